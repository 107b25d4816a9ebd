"""The last step of an engine that never waits for the GPU: parameters of requests stay on the device, a CUDA graph
draws, and the tokens of a step are read while the next one runs.

    python examples/engine.py

Without a GPU: with Numba, or with TRITON_INTERPRET=1 in the environment; there is no graph then.
"""

import torch

from sgl_flashsample import BatchParams, Head, LMHead, Truncation


class LastStep:
    """A row of the batch is a slot: a request has one from ``admit`` until the caller gives it to another request."""

    def __init__(self, lm_head: LMHead, rows: int) -> None:
        device = lm_head.weight.device

        def full(value, dtype):
            return torch.full((rows,), value, dtype=dtype, device=device)

        self.head = Head.tuned(lm_head, max_rows=rows)
        self.hidden = torch.zeros(rows, lm_head.weight.shape[1], dtype=lm_head.weight.dtype, device=device)
        truncation = Truncation(full(1 << 30, torch.int32), full(1.0, torch.float32), full(0.0, torch.float32))
        self.params = BatchParams(
            full(1.0, torch.float32), full(0, torch.int64), full(0, torch.int64), truncation=truncation
        )
        self.graph, self.tokens = None, self.head.draw(self.hidden, self.params).token_ids  # compiles the kernels
        if device.type == "cuda":
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self.tokens = self.head.draw(self.hidden, self.params).token_ids

    def admit(self, slot: int, position: int, seed: int, temperature: float = 1.0, top_p: float = 1.0) -> None:
        """position: of the request's next token."""
        params = self.params
        for tensor, value in (
            (params.temperature, temperature),
            (params.seed, seed),
            (params.position, position),
            (params.truncation.top_p, top_p),
        ):
            tensor[slot].fill_(value)  # in the stream of the steps: a step that runs keeps its parameters

    def step(self, hidden: torch.Tensor) -> torch.Tensor:
        """The next token of each slot, ``[rows]``, on the device. hidden: ``[rows, D]``."""
        self.hidden.copy_(hidden)
        if self.graph is None:
            self.tokens.copy_(self.head.draw(self.hidden, self.params).token_ids)
        else:
            self.graph.replay()
        self.params.position.add_(1)
        return self.tokens


def main(steps: int = 8) -> list[list[int]]:
    """Two requests, the second of which joins later. A model stands in whose next token depends on the last one."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    generator = torch.Generator().manual_seed(0)
    embedding, weight = (torch.randn(1000, 64, generator=generator).to(device) for _ in range(2))
    last_step, tokens = LastStep(LMHead(weight), rows=2), torch.zeros(2, dtype=torch.int64, device=device)
    last_step.admit(0, position=0, seed=7, temperature=0.8)
    on_host = torch.zeros(steps, 2, dtype=torch.int64, pin_memory=device == "cuda")
    for step in range(steps):
        if step == 3:
            last_step.admit(1, position=0, seed=8, top_p=0.9)
            tokens[1].fill_(0)
        tokens.copy_(last_step.step(embedding[tokens]))
        on_host[step].copy_(tokens, non_blocking=True)
    if device == "cuda":
        torch.cuda.synchronize()  # an engine waits for an event of the step before instead
    return [on_host[:, 0].tolist(), on_host[3:, 1].tolist()]


if __name__ == "__main__":
    for request, ids in enumerate(main()):
        print(f"request {request}: {ids}")
