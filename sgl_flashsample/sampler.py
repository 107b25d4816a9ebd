"""``Sampler`` and ``SamplingParams``: numbers in, tokens out, for scripts and small engines. They draw from a
``Head``."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import secrets
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, overload

import torch

from .head import MAX_ROWS, Head, check_rows
from .kernels.params import BatchParams, LMHead, LogitEdits, SampleOutput, Truncation
from .logprobs import LogprobOutput, WantedLogprobs

_UNKNOWN = float("nan")  # of a number on the device: it passes no test
_OFF: dict[str, Callable[[float], bool]] = {
    "top_k": lambda number: number <= 0,
    "top_p": lambda number: number == 1,
    "min_p": lambda number: number == 0,
}


def _numbers(value: Any) -> Sequence:
    """The numbers of a parameter; of a tensor, that they are not known."""
    if isinstance(value, torch.Tensor):
        return [_UNKNOWN]
    value = _fixed(value)
    return value if isinstance(value, tuple) else [value]


def _fixed(value: Any) -> Any:
    """A tuple of Python's numbers for a sequence or an array, which may change later; else as ``_plain``."""
    value = _plain(value)
    return tuple(map(_plain, value)) if isinstance(value, Sequence) and not isinstance(value, str | bytes) else value


def _plain(value: Any) -> Any:
    """NumPy's numbers and arrays as Python's; PyTorch's tensors as they are."""
    return value.tolist() if hasattr(value, "tolist") and not isinstance(value, torch.Tensor) else value


def _check_numbers(name: str, value: Any, valid: Callable[[Any], bool], expected: str) -> None:
    for number in _numbers(value):
        if number is _UNKNOWN:
            continue
        if isinstance(number, bool) or not isinstance(number, int | float) or not valid(number):
            raise ValueError(f"{name} is {number!r}; expected {expected}")


def seed_of_sample(seed: int, sample: int) -> int:
    """The seed of one of several samples that share a seed, an int64: sample 0 has the seed itself. Those of different
    seeds have nothing in common."""
    return seed if sample == 0 else hashed_seed(f"seed {seed}, sample {sample}")


def hashed_seed(text: str) -> int:
    """An int64 that says nothing of that of another text."""
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little", signed=True)


def _is_int64(number: Any) -> bool:
    return isinstance(number, int) and -(2**63) <= number < 2**63


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of the rows of a batch: each is one number for all rows, a sequence with one per row, kept as a tuple,
    or a ``[B]`` tensor, whose numbers are those that it has when it is drawn with.

    temperature: 0 is greedy, else 1e-6 to 1e30. top_k: that many tokens; 0 or less is off. top_p: in (0, 1], 1 is off.
    min_p: in [0, 1], 0 is off. What each allows is in ``Truncation``. seed: any int64; of one number, each row
    gets another (``seed_of_sample``). None: seeds of the ``Sampler``.

    Raises ValueError for numbers out of these ranges. Tensors are not looked into, as that would wait for the device;
    those of floating point are refused where integers are expected.
    """

    temperature: float | Sequence[float] | torch.Tensor = 1.0
    top_k: int | Sequence[int] | torch.Tensor = 0
    top_p: float | Sequence[float] | torch.Tensor = 1.0
    min_p: float | Sequence[float] | torch.Tensor = 0.0
    seed: int | Sequence[int] | torch.Tensor | None = None

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, _fixed(getattr(self, field.name)))
        for name, valid, expected in (
            (
                "temperature",
                lambda x: x == 0 or BatchParams.MIN_TEMPERATURE <= x <= BatchParams.MAX_TEMPERATURE,
                "0, or 1e-6 to 1e30",
            ),
            ("top_k", lambda x: isinstance(x, int) and -(2**31) <= x < 2**31, "an int32"),
            ("top_p", lambda x: 0 < x <= 1, "more than 0, at most 1"),
            ("min_p", lambda x: 0 <= x <= 1, "0 to 1"),
        ):
            _check_numbers(name, getattr(self, name), valid, expected)
        if self.seed is not None:
            _check_numbers("seed", self.seed, _is_int64, "an int64")

    @property
    def truncates(self) -> bool:
        """True if any row may have a top-k, top-p or min-p."""
        return any(not all(is_off(number) for number in _numbers(getattr(self, name))) for name, is_off in _OFF.items())

    @property
    def max_top_k(self) -> int | None:
        """The largest top-k where every row has one, else None."""
        numbers = _numbers(self.top_k)
        return max(numbers) if numbers and all(number >= 1 for number in numbers) else None

    @property
    def all_greedy(self) -> bool:
        """True if every temperature is known to be 0."""
        return all(number == 0 for number in _numbers(self.temperature))


_DEFAULT = SamplingParams()


class _Rows(NamedTuple):
    """The tensors made of ``params`` and of the seed of the ``Sampler``, ``[B]`` each. stay: they have the numbers of
    ``params`` also at the next call: of its tensors, none was copied."""

    params: SamplingParams
    sampler_seed: int
    stay: bool
    temperature: torch.Tensor
    seed: torch.Tensor
    truncation: Truncation | None

    def serve(self, num_rows: int, sampler_seed: int) -> bool:
        """True if these are the tensors of the next call, too, with the same ``params``."""
        return self.stay and len(self.seed) == num_rows and self.sampler_seed == sampler_seed


class Sampler:
    """Draws tokens from the hidden states of one model.

        sampler = Sampler(LMHead.from_hf(model))
        out = sampler(hidden, SamplingParams(temperature=0.7, top_k=50, seed=7))

    Its ``head`` is a ``Head`` with the tuned table that fits on this machine, scratch and, with ``screen``, an INT8
    copy of the weight (``Screen``). Without a table, the built-in choice says which batches are drawn from the copy,
    unmeasured: a weight of less than 250 MB is faster without one.

    head: an ``LMHead``, or its ``[V, D]`` weight. The next call sees a weight that is replaced or written to, and draws
    without the screen until ``sampler.head.screen.rebuild(sampler.head.lm_head)``. A screen does not notice writes
    through ``.data``, as by ``weight.data.copy_(new)``, by a replayed CUDA graph or by another library: rebuild it
    after each, or its tokens are wrong. max_rows: rows of the largest batch
    that scratch is made for at first; a larger batch makes it anew. seed: an int64, for rows without a seed of their
    own; drawn from the system where None. tuned: the file of a tuned table, instead of the one that fits. Several
    threads may call it, on one stream of the device. One that was pickled draws the same tokens, and without the screen
    until that is rebuilt.

    Raises ValueError for a head that cannot be served, and on a machine without a device for the kernels.
    """

    def __init__(
        self,
        head: LMHead | torch.Tensor,
        *,
        max_rows: int = 64,
        screen: bool = False,
        seed: int | None = None,
        tuned: str | os.PathLike[str] | None = None,
    ) -> None:
        expected = f"an integer, 1 to {MAX_ROWS}"
        _check_numbers("max_rows", max_rows, lambda x: isinstance(x, int) and 1 <= x <= MAX_ROWS, expected)
        if not isinstance(screen, bool):
            raise ValueError(f"screen is {screen!r}; expected True or False")
        if tuned is not None and not isinstance(tuned, str | os.PathLike):
            raise ValueError(f"tuned is {tuned!r}; expected the file of a tuned table, or None")
        if seed is not None:
            _check_numbers("seed", seed, _is_int64, "an int64")
        self.head = Head.tuned(head, max_rows=max_rows, screen=screen, file=tuned)
        self.seed = secrets.randbits(62) if seed is None else _plain(seed)
        self.calls = 0  # the position of tokens that are given none
        self._rows: _Rows | None = None  # of the last call
        self._lock = threading.Lock()  # all calls share the scratch

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_lock"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _lock=threading.Lock())

    @overload
    def __call__(
        self,
        hidden: torch.Tensor,
        params: SamplingParams | None = None,
        *,
        position: int | Sequence[int] | torch.Tensor | None = None,
        edits: LogitEdits | None = None,
        return_logprob: bool = False,
        logprobs: None = None,
    ) -> SampleOutput: ...

    @overload
    def __call__(
        self,
        hidden: torch.Tensor,
        params: SamplingParams | None = None,
        *,
        position: int | Sequence[int] | torch.Tensor | None = None,
        edits: LogitEdits | None = None,
        return_logprob: bool = False,
        logprobs: WantedLogprobs | int,
    ) -> LogprobOutput: ...

    def __call__(
        self,
        hidden: torch.Tensor,
        params: SamplingParams | None = None,
        *,
        position: int | Sequence[int] | torch.Tensor | None = None,
        edits: LogitEdits | None = None,
        return_logprob: bool = False,
        logprobs: WantedLogprobs | int | None = None,
    ) -> SampleOutput | LogprobOutput:
        """One token per row of ``hidden``, ``[B, D]`` in the head's dtype.

        params: temperature 1 for all where None; what is made of the last object's numbers is kept for calls with the
        same object. position: of each token in its sequence, so that a seed gives the same tokens again; the number of
        calls so far where None. Rows without a seed draw with the same noise again where place in the batch and
        position are those of an earlier call: where places pass from one request to the next, give each its seed.
        edits, return_logprob, logprobs: as for ``api.sample``.

        Raises ValueError for an argument of another type, shape, dtype or device.
        """
        params = _DEFAULT if params is None else params
        if not isinstance(params, SamplingParams):
            raise ValueError(f"params is a {type(params).__name__}; expected SamplingParams")
        check_rows("hidden", hidden)
        if position is not None:
            _check_numbers("position", position, lambda x: _is_int64(x) and x >= 0, "an int64, 0 or more")
        num_rows = hidden.shape[0]
        with self._lock:
            if num_rows > self.head.max_rows:
                self.head.lm_head.check(hidden)
                self.head.grow(num_rows)
            rows = self._rows
            if rows is None or rows.params is not params or not rows.serve(num_rows, self.seed):
                rows = self._rows = self._rows_of(params, num_rows)
            if position is None:
                position = self.calls
                self.calls += 1
            positions = _tensor("position", position, num_rows, torch.int64, self.head.lm_head.weight.device)
            greedy = params.all_greedy
            batch = BatchParams(rows.temperature, rows.seed, positions, rows.truncation, edits, greedy)
            if logprobs is not None:
                return LogprobOutput.of(*self.head.draw_with_logprobs(hidden, batch, WantedLogprobs.of(logprobs)))
            return self.head.draw(hidden, batch, return_logprob=return_logprob)

    def _rows_of(self, params: SamplingParams, num_rows: int) -> _Rows:
        device = self.head.lm_head.weight.device
        seed = _plain(self.seed if params.seed is None else params.seed)
        if isinstance(seed, int):
            seed = [seed_of_sample(seed, row) for row in range(num_rows)]
        temperature = _tensor("temperature", params.temperature, num_rows, torch.float32, device)
        seeds = _tensor("seed", seed, num_rows, torch.int64, device)
        made, truncation = [(params.temperature, temperature), (params.seed, seeds)], None
        if params.truncates:
            truncation = Truncation(
                _tensor("top_k", params.top_k, num_rows, torch.int32, device),
                _tensor("top_p", params.top_p, num_rows, torch.float32, device),
                _tensor("min_p", params.min_p, num_rows, torch.float32, device),
                params.max_top_k,
            )
            made += [(getattr(params, name), getattr(truncation, name)) for name in _OFF]
        stay = all(tensor is given or not isinstance(given, torch.Tensor) for given, tensor in made)
        return _Rows(params, self.seed, stay, temperature, seeds, truncation)


def _tensor(name: str, value: Any, num_rows: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """``[num_rows]`` on the device: a tensor as it is where it fits. Raises ValueError for another length, and for
    floating point where integers are expected."""
    value = _plain(value)
    if isinstance(value, int | float):
        return torch.full((num_rows,), value, dtype=dtype, device=device)
    tensor = value if isinstance(value, torch.Tensor) else torch.tensor(value, dtype=dtype)
    if tensor.shape != (num_rows,):
        raise ValueError(f"{name} has shape {tuple(tensor.shape)}; expected {(num_rows,)}, one for each row of hidden")
    if tensor.dtype is torch.bool or tensor.is_complex():
        raise ValueError(f"{name} is {tensor.dtype}; expected numbers")
    if tensor.is_floating_point() and not dtype.is_floating_point:
        raise ValueError(f"{name} is {tensor.dtype}; expected integers")
    if dtype is torch.int32 and tensor.dtype is torch.int64:  # of top-k: what is too large is off, as V is
        tensor = tensor.clamp(torch.iinfo(dtype).min, torch.iinfo(dtype).max)
    return tensor.to(device, dtype)
