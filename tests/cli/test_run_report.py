"""What is said of a run before and after it."""

from __future__ import annotations

import pytest

from tests.trainers.tiny_runs import tiny_trainer, token_rows
from trellium.cli.run_report import PlanPrinter, rate


@pytest.mark.parametrize(
    ("per_second", "said"), [(0.0421, "0.0421"), (0.4, "0.4"), (3.266, "3.27"), (61.83, "61.8"), (1234.5, "1,234")]
)
def test_a_rate_has_three_digits_and_is_never_rounded_to_nothing(per_second, said):
    assert rate(per_second) == said


def test_the_plan_of_a_stream_has_no_number_of_rows(tmp_path, capsys):
    plan = PlanPrinter(model="tiny", data="stream", device="cpu")
    stream = token_rows(8).to_iterable_dataset()
    tiny_trainer(tmp_path, train_dataset=stream, callbacks=[plan], bf16=True, max_steps=1).train()
    said = " ".join(capsys.readouterr().out.split())  # wherever the lines are broken
    assert "rows as they come" in said
    assert "float32, computing in bfloat16" in said
    assert "all trained" in said
    assert "saved at the end" in said
