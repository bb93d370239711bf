"""`max_compiles(n)`: a block, a function or a test that may compile at most `n` times, and says which argument is to blame if it does more.

    from trellium.monitor import max_compiles

    with max_compiles(4):          # a plan of four shapes
        trainer.train()

One compilation is a graph with its backward, if it has one: a training step of a new shape is one. Failed compilations count. So does,
whatever `n` is, a frame that Dynamo gave up at its recompile limit: it compiles no more because it runs eagerly, which is worse. Compilations of every
thread count. Nothing is interrupted: the block runs to its end, and the error names everything that was compiled in it.

As a pytest fixture, which the installation registers:

    def test_one_length_is_one_graph(max_compiles):
        with max_compiles(1): ...

Source: the model is equinox's `assert_max_traces`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from trellium.monitor import ledger
from trellium.monitor.ledger import Change, Compilation, EagerFrame, Watch
from trellium.monitor.records import described


class TooManyCompiles(AssertionError):
    """More was compiled than allowed. The first compilation that was one too many is the one to blame.

    Attributes:
        compilations: all that were compiled in the block.
        blamed: the compilation, or the frame given up, that was one too many.
        frame: its `file:line`.
        change: what was new about its inputs: argument, dimension, old and new size; None if nothing about them was.
    """

    def __init__(self, message: str, compilations: tuple[Compilation, ...], blamed: Compilation | EagerFrame) -> None:
        super().__init__(message)
        self.compilations = compilations
        self.blamed = blamed
        self.frame = blamed.frame
        self.change: Change | None = blamed.changes[0] if blamed.changes else None


@contextlib.contextmanager
def max_compiles(n: int) -> Iterator[Watch]:
    """Allow at most `n` compilations inside; gives the ledger's records of them. Also a decorator.

    Args:
        n: graphs, each with its backward; 0 for code that must have its graphs already.

    Raises:
        ValueError: `n` is negative.
        TooManyCompiles: at the end of the block, if it raised nothing itself.
    """
    if n < 0:
        raise ValueError(f"max_compiles takes the number of compilations allowed, 0 or more; got {n}")
    with ledger.watch() as new:
        yield new
    heads = _one_per_graph(new)
    given_up = [frame for frame in new.eager_frames if frame.limit is not None]
    if len(heads) <= n and not given_up:
        return
    blamed: Compilation | EagerFrame = heads[n] if len(heads) > n else given_up[0]
    message = [f"{len(heads)} graphs were compiled where at most {n} may be. One too many: {_blame(blamed)}"]
    message += [f"  {i}. {compilation} ({compilation.frame})" for i, compilation in enumerate(heads, start=1)]
    message += [f"  {frame}" for frame in given_up]
    raise TooManyCompiles("\n".join(message), tuple(new), blamed)


def _one_per_graph(compilations: Watch) -> list[Compilation]:
    """The forwards, and those backwards whose forward was compiled before the block, in order."""
    inside = {compilation.number for compilation in compilations}
    return [compilation for compilation in compilations if compilation.forward not in inside]


def _blame(blamed: Compilation | EagerFrame) -> str:
    where = f"{blamed.name}, {blamed.frame}" + (f", called at {blamed.caller}" if blamed.caller else "")
    if blamed.changes:
        return f"{described(blamed.changes)} ({where})"
    reason = blamed.reason if isinstance(blamed, EagerFrame) else blamed.failure or blamed.recompile_reason
    return f"{where}: {reason or 'the first graph of this frame'}"
