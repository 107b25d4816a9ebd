"""The public functions: ``sample``, ``sample_from_logits``, ``argmax`` and, for speculative decoding, ``verify``. For
engines other than SGLang, whose backend draws from a ``Head`` as they do."""

from __future__ import annotations

import dataclasses
import numbers
from typing import NamedTuple, overload

import torch

from .cpu_path import draws_in_host_memory, follow_drafts_on_cpu
from .head import Head, check_params, check_rows
from .kernels.config import next_power_of_2
from .kernels.follow_drafts import follow_drafts
from .kernels.params import BatchParams, LMHead, LogitsSpec, SampleOutput, check_tensor
from .kernels.workspace import Workspace
from .kinds import SamplingPath
from .logprobs import LogprobOutput, WantedLogprobs
from .paths import read_logits

_NONE = -1  # no node, no token
_MIN_ZEROS = 1024
# By device and number of rows. Never freed: a captured graph reads them at the addresses that they had during the
# capture.
_zeros: dict[tuple[torch.device, int], torch.Tensor] = {}
_greedy_params: dict[tuple[torch.device, int], BatchParams] = {}


@overload
def sample(
    hidden: torch.Tensor,
    lm_head: torch.Tensor | LMHead | Head,
    params: BatchParams,
    *,
    return_logprob: bool = False,
    path: SamplingPath | str | None = None,
    logprobs: None = None,
) -> SampleOutput: ...


@overload
def sample(
    hidden: torch.Tensor,
    lm_head: torch.Tensor | LMHead | Head,
    params: BatchParams,
    *,
    return_logprob: bool = False,
    path: SamplingPath | str | None = None,
    logprobs: WantedLogprobs | int,
) -> LogprobOutput: ...


def sample(
    hidden: torch.Tensor,
    lm_head: torch.Tensor | LMHead | Head,
    params: BatchParams,
    *,
    return_logprob: bool = False,
    path: SamplingPath | str | None = None,
    logprobs: WantedLogprobs | int | None = None,
) -> SampleOutput | LogprobOutput:
    """Draw ``token[b] ~ softmax(logits[b] / temperature[b])``, exactly, in one pass over the head.

    ``logits = softcap(logit_scale * (hidden @ weight.T))``, rounded to the head's ``logits_dtype``, then edited as
    ``params.edits`` says; the distribution is truncated as ``params.truncation`` says (FlashSampling paper, section 3.2
    and Lemma 4.3; for truncation see ``kernels/truncation_math.py``). Logits are not written to memory, except those of
    truncated rows, 2 or 4 bytes each. Where a GEMM is faster, the batch takes one, and one kernel reads its output.

    Args:
        hidden: ``[B, D]``, contiguous rows, the head's ``hidden_dtype`` and device.
        lm_head: ``[V, D]`` weight (bfloat16, float16 or float32), an ``LMHead`` for padding, a softcap, a scale, a
            float8_e4m3fn weight or a vocabulary shard, or a ``Head``, whose table, scratch and screen are used. Keep
            one per model.
        params: per-row temperature, seed and position.
        return_logprob: also compute the token's log-probability.
        path: the path to take; None for the one that the table of the ``Head`` has as the fastest; without a ``Head``,
            the built-in choice.
        logprobs: also the logprobs of that many likeliest ids, 0 to 128, or of what a ``WantedLogprobs`` names: then
            the result is a ``LogprobOutput``, with the token's logprob, and the batch takes the logits path, which has
            its ``[B, V]`` logits in memory, and whose tokens it gets; for a few given ids alone it keeps its path.

    Invariants: the token depends on (logits row, seed, position) only, not on batch size, order,
    neighbours, tile, shards, path (``SamplingPath.FLASHINFER`` apart), or eager against graph; ids are below
    ``vocab_size``; the first maximum wins a greedy tie. Never synchronises; usable inside a CUDA graph once a
    call of the same shapes has compiled the kernels (a replay reads ``params`` anew).

    Raises:
        ValueError: a tensor of the wrong shape, dtype, layout or device; the message names it. An unknown path, or one
            that cannot serve the head or the batch.
    """
    check_rows("hidden", hidden)
    head = lm_head if isinstance(lm_head, Head) else Head(lm_head)
    if logprobs is not None:
        return LogprobOutput.of(*head.draw_with_logprobs(hidden, params, WantedLogprobs.of(logprobs), path=path))
    return head.draw(hidden, params, return_logprob=return_logprob, path=path)


def sample_from_logits(
    logits: torch.Tensor,
    params: BatchParams,
    *,
    vocab_size: int | None = None,
    vocab_start: int = 0,
    shards: int = 1,
    logit_scale: float | None = None,
    softcap: float | None = None,
    return_logprob: bool = False,
    workspace: Workspace | None = None,
) -> SampleOutput:
    """Draw ``token[b] ~ softmax(logits[b] / temperature[b])``, exactly, in one pass over logits that are in memory
    (the standalone sampler of the FlashSampling paper, section 5.2).

    Args:
        logits: ``[B, V]`` bfloat16, float16 or float32, contiguous rows at any distance; not changed. Fastest where
            rows start at multiples of 16 elements.
        params: per-row temperature, seed and position; edits and truncation as in ``sample``.
        vocab_size: columns from here on are padding, never read or drawn (default V).
        vocab_start: absolute id of column 0, a multiple of 16, where the columns are one of ``shards`` shards of
            the vocabulary.
        logit_scale: the logits are multiplied by it first, where it is set.
        softcap: then they become ``softcap * tanh(logits / softcap)``, where it is set.
        return_logprob: also compute the token's log-probability.
        workspace: scratch to reuse, ``Workspace(512 * B, device)`` for any batch of up to B rows; allocated when None.

    Invariants: as for ``sample``. The same logits, seed and position give the token that ``sample`` draws, except in
    near-ties: rows whose two best scores differ by one rounding of a float32.

    Raises:
        ValueError: a tensor of the wrong shape, dtype, layout or device; the message names it.
    """
    check_rows("logits", logits)
    check_params(params)
    if workspace is not None and not isinstance(workspace, Workspace):
        raise ValueError(f"workspace is {workspace!r}; expected a Workspace or None")
    size = logits.shape[-1] if vocab_size is None else vocab_size
    spec = LogitsSpec(size, vocab_start, logit_scale, softcap, shards=shards)
    return read_logits(logits, spec, params, workspace, return_logprob=return_logprob)


def argmax(hidden: torch.Tensor, lm_head: torch.Tensor | LMHead | Head) -> torch.Tensor:
    """The first id with the largest logit: ``torch.argmax(logits, -1)``, for the logits of ``sample``, which are not
    written to memory.

    Args:
        hidden: ``[B, D]``, contiguous rows, the head's dtype and device.
        lm_head: as for ``sample``; a whole vocabulary. Where the head is a shard, call ``sample`` with ``all_greedy``:
            its scores tell which shard holds the token.

    Returns ``[B]`` int64. The token depends on the row's logits only, not on the batch, the path or the screen. With a
    ``Head`` that has scratch, allocates only the token ids and the scores. Usable inside a CUDA graph once a call of
    the same shapes has compiled the kernels; synchronises in the first call on a device and in the first whose rows
    outnumber the cached zeros, but never in one that is captured.

    Raises ValueError for a tensor of the wrong shape, dtype or device, and for a shard of a head.
    """
    check_rows("hidden", hidden)
    head = _whole("argmax", lm_head)
    return head.draw(hidden, _greedy_params_for(hidden.shape[0], hidden.device)).token_ids


def _whole(function: str, lm_head: torch.Tensor | LMHead | Head) -> Head:
    """Raises ValueError for a shard: its tokens mean something beside those of the others alone."""
    head = lm_head if isinstance(lm_head, Head) else Head(lm_head)
    if head.lm_head.shards > 1:
        raise ValueError(f"lm_head is one of {head.lm_head.shards} shards; {function} expects a whole vocabulary")
    return head


class DraftTree(NamedTuple):
    """How D nodes hang together, the same in every row, or one tree per row: ``[D]`` or ``[B, D]`` int64 each.

    first_child, next_sibling: nodes, -1 for none. depth: 0 of the root, which is node 0.
    """

    first_child: torch.Tensor
    next_sibling: torch.Tensor
    depth: torch.Tensor

    @classmethod
    def chain(cls, num_nodes: int, device: torch.device | str) -> DraftTree:
        """Each node but the last has one child. Raises ValueError for less than 1 node."""
        if not isinstance(num_nodes, numbers.Integral) or num_nodes < 1:
            raise ValueError(f"num_nodes is {num_nodes!r}; expected an integer, 1 or more")
        depth = torch.arange(num_nodes, device=device)
        none = torch.full_like(depth, _NONE)
        return cls(torch.where(depth + 1 < num_nodes, depth + 1, none), none, depth)

    @classmethod
    def from_parents(cls, parents: list[int], device: torch.device | str) -> DraftTree:
        """parents: of each node, -1 of node 0, the root; parents come before their children. Of siblings, the one that
        comes first is asked first. Raises ValueError for anything else."""
        if not parents:
            raise ValueError("parents has no node; expected -1 and the parents of the other nodes")
        first, following, depth = [_NONE] * len(parents), [_NONE] * len(parents), [0] * len(parents)
        last_child: dict[int, int] = {}
        for node, parent in enumerate(parents):
            if node == 0:
                if parent != _NONE:
                    raise ValueError(f"parents[0] is {parent}; expected -1")
                continue
            if not isinstance(parent, numbers.Integral) or not 0 <= parent < node:
                raise ValueError(f"parents[{node}] is {parent!r}; expected an integer, 0 to {node - 1}")
            depth[node] = depth[parent] + 1
            if parent in last_child:
                following[last_child[parent]] = node
            else:
                first[parent] = node
            last_child[parent] = node
        return cls(*(torch.tensor(column, device=device) for column in (first, following, depth)))


class VerifyOutput(NamedTuple):
    """token_ids: ``[B, D]`` int64, the tokens that each row gains, then -1: its accepted drafts and the token drawn
    after them. num_tokens: ``[B]`` int32, how many these are, 1 to D. nodes: ``[B, D]`` int32, the node at which each
    was drawn, as a place in ``[B * D]``, then -1: what of the KV cache stays. logprobs: ``[B, D]`` float32 of these
    tokens, 0 elsewhere; None unless asked for."""

    token_ids: torch.Tensor
    num_tokens: torch.Tensor
    nodes: torch.Tensor
    logprobs: torch.Tensor | None


def verify(
    hidden: torch.Tensor,
    lm_head: torch.Tensor | LMHead | Head,
    draft_tokens: torch.Tensor,
    params: BatchParams,
    tree: DraftTree | None = None,
    *,
    return_logprob: bool = False,
    path: SamplingPath | str | None = None,
) -> VerifyOutput:
    """The tokens that each row gains from its drafts: those that drawing one token after another would give.

    At every node a token is drawn with the noise of its position; a draft is accepted where it is the token drawn at
    its parent. The tokens are the same with other drafts, or with none: drafts decide only how many come at once. This
    has the law of verification by acceptance probabilities (FlashSpec; SGLang with thresholds of 1).

    Args:
        hidden: ``[B, D, H]``, contiguous, the head's dtype and device: the final hidden state after each node's token.
        lm_head: as in ``sample``; a whole vocabulary.
        draft_tokens: ``[B, D]`` int64, the token of each node. That of node 0, the last known token, is not looked at.
        params: one value per row; position is that of the token which the root draws, and a node d levels below draws
            that of d positions later. A mask of ``edits`` has a row per row, or one per node (``B * D``).
        tree: a chain when None.
        return_logprob: as in ``sample``.
        path: as in ``sample``, for batches of ``B * D`` rows.

    Raises:
        ValueError: as ``sample``, for drafts or a tree of another shape, and for a shard of a head. Numbers in a tree
        are not checked, as they are on the device: one that is no node counts as -1.
    """
    if not isinstance(hidden, torch.Tensor) or hidden.dim() != 3 or hidden.shape[1] == 0:
        given = tuple(hidden.shape) if isinstance(hidden, torch.Tensor) else f"a {type(hidden).__name__}"
        raise ValueError(f"hidden is {given}; expected [B, D, H] with a D of 1 or more")
    shape = hidden.shape[:2]
    num_rows, num_nodes = shape
    check_tensor("draft_tokens", draft_tokens, tuple(shape), torch.int64, hidden)
    check_params(params)
    params.check_rows(num_rows, hidden)
    tree = DraftTree.chain(num_nodes, hidden.device) if tree is None else tree
    if not isinstance(tree, DraftTree):
        raise ValueError(f"tree is a {type(tree).__name__}; expected a DraftTree or None")
    for name, column in zip(tree._fields, tree, strict=True):
        if not isinstance(column, torch.Tensor):
            raise ValueError(f"tree.{name} is a {type(column).__name__}; expected an int64 tensor")
        if tuple(column.shape) not in ((num_nodes,), tuple(shape)):
            raise ValueError(f"tree.{name} is {tuple(column.shape)}; expected {(num_nodes,)} or {tuple(shape)}")
        if column.dtype != torch.int64 or column.device != hidden.device:
            raise ValueError(f"tree.{name} is {column.dtype} on {column.device}; expected int64 on {hidden.device}")
    first_child, next_sibling, depth = (column.expand(shape).contiguous() for column in tree)
    head = _whole("verify", lm_head)
    params = params.repeated(num_nodes)
    params = dataclasses.replace(params, position=params.position + depth.reshape(-1))
    drawn = head.draw(hidden.flatten(0, 1), params, return_logprob=return_logprob, path=path)
    token_ids = drawn.token_ids.view(shape)
    follow = follow_drafts_on_cpu if draws_in_host_memory(hidden.device) else follow_drafts
    nodes, num_tokens = follow(token_ids, draft_tokens.contiguous(), first_child, next_sibling)
    on_path, places = nodes >= 0, nodes.clamp(min=0).long()
    logprobs = None if drawn.logprobs is None else torch.where(on_path, drawn.logprobs[places], 0.0)
    return VerifyOutput(torch.where(on_path, drawn.token_ids[places], _NONE), num_tokens, nodes, logprobs)


def _greedy_params_for(num_rows: int, device: torch.device) -> BatchParams:
    """The parameters of ``num_rows`` greedy rows. Seeds and positions are 0: greedy rows have no noise."""
    params = _greedy_params.get((device, num_rows))
    if params is None:
        zeros = _zeros_for(num_rows, device)
        params = BatchParams(zeros.view(torch.float32)[:num_rows], zeros[:num_rows], zeros[:num_rows], all_greedy=True)
        if (device, len(zeros)) in _zeros:  # coverage: else needs a GPU
            _greedy_params[device, num_rows] = params
    return params


def _zeros_for(num_rows: int, device: torch.device) -> torch.Tensor:
    """``num_rows`` int64 zeros or more."""
    size = max(_MIN_ZEROS, next_power_of_2(max(1, num_rows)))
    zeros = _zeros.get((device, size))
    if zeros is None:
        zeros = torch.zeros(size, dtype=torch.int64, device=device)
        if device.type == "cuda":  # coverage: needs a GPU
            if torch.cuda.is_current_stream_capturing():
                return zeros  # its graph alone fills it
            torch.cuda.current_stream(device).synchronize()  # other streams will read it
        _zeros[device, size] = zeros
    return zeros
