"""Ctrl-C: one press ends a run after the step it is in, says where to go on, and is never lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import TrainerCallback

from tests.trainers.tiny_runs import tiny_trainer, token_rows
from trellium.cli.interruption import stop_on_interrupt
from trellium.cli.training import stopped_message

COMMAND = ["trellium", "sft"]


class Press(TrainerCallback):
    """Presses Ctrl-C at an event of a step."""

    def __init__(self, event: str, step: int, times: int = 1) -> None:
        self.times, self.step = times, step
        setattr(self, event, self._press)

    def _press(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


def train(trainer, **options) -> None:
    with stop_on_interrupt(trainer) as stop:
        trainer.train(**options)
        stop.check(trainer)


def interrupted_run(folder: Path, press: Press, **options):
    trainer = tiny_trainer(
        folder,
        train_dataset=token_rows(16),
        callbacks=[press],
        max_steps=6,
        save_strategy="steps",
        save_steps=2,
        gradient_accumulation_steps=2,
        per_device_train_batch_size=1,
        **options,
    )
    with pytest.raises(KeyboardInterrupt):
        train(trainer)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    return trainer


@pytest.mark.parametrize(
    ("event", "step", "last", "saved"),
    [
        ("on_step_begin", 2, 3, "checkpoint-2"),
        ("on_substep_end", 3, 3, "checkpoint-2"),
        ("on_step_end", 3, 3, "checkpoint-2"),
        ("on_step_end", 4, 4, "checkpoint-4"),
        ("on_log", 4, 4, "checkpoint-4"),
        ("on_save", 4, 4, "checkpoint-4"),
    ],
)
def test_one_press_at_any_place_ends_the_run_with_a_whole_checkpoint(tmp_path, event, step, last, saved):
    trainer = interrupted_run(tmp_path, Press(event, step))
    assert trainer.state.global_step in (last - 1, last)
    assert trainer.resume_point == str(tmp_path / saved)
    assert (tmp_path / saved / "trainer_state.json").is_file()
    again = tiny_trainer(tmp_path, train_dataset=token_rows(16), max_steps=6, gradient_accumulation_steps=2)
    again.train(resume_from_checkpoint=trainer.resume_point)
    assert again.state.global_step == 6


def test_a_press_in_an_evaluation_ends_it(tmp_path):
    trainer = interrupted_run(
        tmp_path, Press("on_prediction_step", 2), eval_dataset=token_rows(4), eval_strategy="steps", eval_steps=2
    )
    assert trainer.state.global_step == 2


def test_the_second_press_stops_at_once(tmp_path):
    trainer = interrupted_run(tmp_path, Press("on_substep_end", 0, times=2))
    assert trainer.state.global_step == 0
    assert trainer.resume_point is None
    assert "Nothing was saved" in stopped_message(trainer, COMMAND, [])


def test_a_press_in_the_last_step_lets_the_run_end_as_usual(tmp_path):
    trainer = tiny_trainer(tmp_path, train_dataset=token_rows(8), callbacks=[Press("on_step_end", 2)], max_steps=2)
    train(trainer)
    assert trainer.state.global_step == 2


def test_the_message_names_no_checkpoint_of_an_earlier_run(tmp_path, caplog):
    tiny_trainer(tmp_path, train_dataset=token_rows(8), save_strategy="steps", save_steps=5, max_steps=5).train()
    assert "earlier run" not in caplog.text
    trainer = interrupted_run(tmp_path, Press("on_step_begin", 0))
    assert "holds checkpoint-5 of an earlier run" in caplog.text
    assert "Nothing was saved" in stopped_message(trainer, COMMAND, ["--max_steps", "6"])


def test_a_resumed_run_that_saved_nothing_yet_goes_on_from_where_it_was_resumed(tmp_path, caplog):
    trainer = interrupted_run(tmp_path, Press("on_step_begin", 2))
    options = {"train_dataset": token_rows(16), "max_steps": 6, "gradient_accumulation_steps": 2}
    again = tiny_trainer(tmp_path, callbacks=[Press("on_step_end", 3)], per_device_train_batch_size=1, **options)
    with pytest.raises(KeyboardInterrupt):
        train(again, resume_from_checkpoint=trainer.resume_point)
    assert again.resume_point == trainer.resume_point
    assert "earlier run" not in caplog.text
    said = stopped_message(again, COMMAND, ["--resume_from_checkpoint", "x", "--seed", "1"])
    assert said.endswith(f"trellium sft --seed 1 --resume_from_checkpoint {trainer.resume_point}")


_RUN = """
import sys
from trellium.cli import main
sys.exit(main())
"""


def test_ctrl_c_on_the_command_ends_cleanly_and_says_how_to_go_on(tmp_path, saved_model):
    (tmp_path / "rows.jsonl").write_text('{"text": "the quick brown fox"}\n' * 12)
    options = f"sft --model_name_or_path {saved_model} --dataset_name rows.jsonl --max_steps 100000 --save_steps 2"
    options += " --save_total_limit 2 --use_cpu true --disable_tqdm true --output_dir out"
    process = subprocess.Popen(
        [sys.executable, "-c", _RUN, *options.split()],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2] / "src")},
        # A shell's background job ignores SIGINT, and so would its child.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        limit = time.monotonic() + 240
        while not list(tmp_path.glob("out/checkpoint-*/trainer_state.json")):
            assert process.poll() is None, process.stderr.read()
            assert time.monotonic() < limit
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=240)
    finally:
        process.kill()
    assert process.returncode == 130, err
    assert "Traceback" not in err
    assert "The last checkpoint of this run is out/checkpoint-" in out
    assert "--resume_from_checkpoint out/checkpoint-" in out
