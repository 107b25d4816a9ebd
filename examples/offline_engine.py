"""``sgl.Engine`` with the backend in this process, through updates of its weights as in reinforcement learning. Prints
what it answers as one line of JSON:

    python examples/offline_engine.py CHECKPOINT OTHER_CHECKPOINT [NAME=VALUE ...]

The second checkpoint is of the same shape: its LM head is given to the running engine as a tensor, and then that of the
first one again. On a GPU the engine also releases its memory and takes it back. NAME=VALUE: further arguments of the
engine, as JSON, such as mem_fraction_static=0.8.
"""

import json
import sys

import torch


def answers(engine, paths: set[str]) -> list[list[int]]:
    """Ids after six prompts: of four greedy requests, and of two with a seed. paths: takes the path of each id, where
    FLASHSAMPLE_REPORT_PATH is 1."""
    prompts = [[300 + row] for row in range(6)]
    params = [{"temperature": 0.0}] * 4 + [{"temperature": 1.0, "sampling_seed": row} for row in range(2)]
    params = [one | {"max_new_tokens": 8, "ignore_eos": True} for one in params]
    answered = engine.generate(input_ids=prompts, sampling_params=params)
    paths.update(*(one["meta_info"].get("flashsample_path", ()) for one in answered))
    return [one["output_ids"] for one in answered]


def update(engine, head: torch.Tensor) -> None:
    """Newer releases of SGLang write tensors only within a session."""
    in_session = hasattr(engine, "begin_weight_update")
    if in_session:
        engine.begin_weight_update(selector="all")
    success, message = engine.update_weights_from_tensor([("lm_head.weight", head)])
    assert success, message
    if in_session:
        engine.end_weight_update()


def main(checkpoint: str, other: str, *arguments: str) -> None:
    import sglang
    from safetensors.torch import load_file

    options = {name: json.loads(value) for name, _, value in (argument.partition("=") for argument in arguments)}
    paths: set[str] = set()
    engine = sglang.Engine(model_path=checkpoint, sampling_backend="flashsample", **options)
    try:
        status = engine.get_server_info()["internal_states"][0]["flashsample"]
        result = {"active": status["active"], "heads": len(status["heads"]), "before": answers(engine, paths)}
        heads = [load_file(f"{folder}/model.safetensors")["lm_head.weight"] for folder in (other, checkpoint)]
        for name, head in zip(("other", "again"), heads, strict=True):
            update(engine, head.cuda() if torch.cuda.is_available() else head)
            result[name] = answers(engine, paths)
        if torch.cuda.is_available():
            engine.release_memory_occupation(tags=["kv_cache"])
            engine.resume_memory_occupation(tags=["kv_cache"])
            result["resumed"] = answers(engine, paths)
    finally:
        engine.shutdown()
    print(json.dumps(result | {"paths": sorted(paths)}), flush=True)


if __name__ == "__main__":  # the engine starts processes that import this file
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
