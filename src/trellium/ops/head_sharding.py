"""A head whose vocabulary is split over the ranks of a tensor-parallel group.

Each rank holds `weight[first : first + V_local]` and the same hidden states. The distribution is over the whole vocabulary, but no rank gathers the head
or sees another's logits: what the ranks exchange is one maximum and one sum of a few numbers an edge forward (a third, a minimum of token numbers, where
top-1 is asked for), and one sum of `[E, H]` backward, the gradient of the hidden states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import ProcessGroup, ReduceOp, _resolve_process_group


@dataclass(frozen=True, slots=True)
class VocabularyShard:
    """This rank's part of a head.

    Attributes:
        first: the number of the first token that this rank's weights score. Parts follow each other without gaps, in the order of the ranks.
        group: the ranks that hold the parts.
    """

    first: int
    group: ProcessGroup


def shard_arguments(shard: VocabularyShard | None) -> tuple[int, str]:
    """What an operator is given of a shard: its first token and its group's name, "" for none."""
    return (0, "") if shard is None else (shard.first, shard.group.group_name)


def reduce_maximum(values: Tensor, group: str) -> Tensor:
    """`values`, in place the greatest of all ranks."""
    return _reduce(values, ReduceOp.MAX, group)


def reduce_minimum(values: Tensor, group: str) -> Tensor:
    """`values`, in place the least of all ranks."""
    return _reduce(values, ReduceOp.MIN, group)


def reduce_sum(values: Tensor, group: str) -> Tensor:
    """`values`, in place the sum of all ranks'."""
    return _reduce(values, ReduceOp.SUM, group)


def reduce_sums(values: list[Tensor], group: str) -> list[Tensor]:
    """Several `[E]` sums in one exchange."""
    return list(reduce_sum(torch.stack(values), group).unbind()) if group else values


def _reduce(values: Tensor, operation: ReduceOp.RedOpType, group: str) -> Tensor:
    if group:
        dist.all_reduce(values, operation, _resolve_process_group(group))
    return values
