"""The facts of this server: what SGLang's configuration and our environment variables say, read once at the start."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any

from .. import __version__
from ..kernels.rng import NOISE_ABI
from ..switches import REPORT_PATH_VARIABLE, REQUIRE_VARIABLE, SCREEN_VARIABLE, STEP_GRAPHS_VARIABLE, switch
from . import support
from .screen_lifecycle import ScreenMode
from .versions import sglang_version

logger = logging.getLogger("sgl_flashsample")


class NotActiveError(RuntimeError):
    """The server must not start: it was asked to run with the fused pass only, and the fused pass serves nothing."""


def refuse_to_start(reason: str) -> None:
    """Where ``FLASHSAMPLE_REQUIRE`` is on, log the reason as an error and raise NotActiveError."""
    if switch(REQUIRE_VARIABLE):
        message = f"flashsample: the server does not start, because {REQUIRE_VARIABLE} is on and {reason}"
        logger.error("%s", message)
        raise NotActiveError(message)


@dataclasses.dataclass
class Settings:
    """unsupported: why the fused pass serves nothing here, or None. seed: of the server. custom_processors: requests
    may bring a custom logit processor. original_logprobs: SGLang returns logprobs of unscaled logits. bool_masks:
    grammar masks are of bools. verifies: drafts of speculative decoding are verified. shares_head: ranks of DP
    attention share an LM head. report_path: responses name the path of each token. replica: rank among replicas and
    under DP attention, which get different requests.
    last_stage: this process has the model's LM head; the other stages of a pipeline have none. metrics: ``/metrics`` is
    on. metric_labels: the labels that SGLang gives the metrics of this process. reports: this rank reports to
    ``/metrics`` and to the log. deterministic: a row must not depend on its batch (``support.is_deterministic``).
    """

    unsupported: str | None = None
    seed: int = 0
    custom_processors: bool = False
    original_logprobs: bool = False
    bool_masks: bool = False
    verifies: bool = False
    shares_head: bool = False
    report_path: bool = False
    replica: int = 0
    is_pipeline: bool = False
    last_stage: bool = True
    metrics: bool = False
    metric_labels: dict[str, str] = dataclasses.field(default_factory=dict)
    reports: bool = True
    deterministic: bool = False

    @classmethod
    def of_server(cls) -> Settings:
        """The settings of this process. An SGLang whose configuration cannot be read is ``unsupported``."""
        settings = cls(report_path=bool(switch(REPORT_PATH_VARIABLE)))
        try:
            settings._read()
        except Exception as error:
            settings.unsupported = settings.unsupported or f"this server's configuration cannot be read ({error})"
        return settings

    def _read(self) -> None:
        from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB
        from sglang.srt.runtime_context import get_device, get_exec, get_observability, get_parallel, get_spec

        self.seed = int(get_device().random_seed or 0)
        self.bool_masks = getattr(get_exec().kernel, "grammar_backend", None) == "outlines"
        self.custom_processors = bool(get_exec().features.enable_custom_logit_processor)
        self.original_logprobs = bool(SGLANG_RETURN_ORIGINAL_LOGPROB)
        parallel, observability = get_parallel(), get_observability()
        self.last_stage = parallel.pp_rank == parallel.pp_size - 1
        replica = getattr(parallel, "dp_rank", None)  # SGLang 0.5.17 says it with the model (``hooks.load_model``)
        self.replica = replica or (0 if parallel.tp_size == 1 else parallel.attn_dp_rank)
        self.is_pipeline = parallel.pp_size > 1
        self.metrics = bool(observability.enable_metrics)
        self.metric_labels = _metric_labels() if self.metrics else {}
        # Among ranks with the same batches the first reports, as for SGLang's own metrics.
        self.reports = parallel.tp_size == 1 or parallel.attn_tp_rank == 0
        self.reports = self.reports or bool(observability.enable_metrics_for_all_schedulers)
        self.unsupported = support.unsupported_server()
        self.shares_head = support.shares_head()
        self.deterministic = support.is_deterministic()
        self.verifies = get_spec().speculative_algorithm is not None
        if self.report_path and self.verifies:
            self.report_path = False
            logger.warning(
                "flashsample: %s does nothing here: SGLang reports one value per step, and with speculative decoding a "
                "step may give several tokens",
                REPORT_PATH_VARIABLE,
            )

    @property
    def shared(self) -> dict[str, Any]:
        """By name, the values in which ranks must not differ."""
        return {
            "sgl-flashsample": __version__,
            "SGLang": sglang_version(),
            "NOISE_ABI": NOISE_ABI,
            REQUIRE_VARIABLE: switch(REQUIRE_VARIABLE),
            STEP_GRAPHS_VARIABLE: bool(switch(STEP_GRAPHS_VARIABLE)),
            "SGLANG_RETURN_ORIGINAL_LOGPROB": self.original_logprobs,
            "custom logit processors": self.custom_processors,
            "deterministic inference": self.deterministic,
            "grammar masks of bools": self.bool_masks,
        }


def _metric_labels() -> dict[str, str]:
    """The labels of SGLang's own metrics of a scheduler, but ``priority``: a batch has rows of several. Empty, after a
    warning, where they cannot be read."""
    try:
        from sglang.srt.disaggregation.utils import DisaggregationMode
        from sglang.srt.runtime_context import get_disagg, get_observability, get_parallel, get_serving

        parallel, disagg = get_parallel(), get_disagg()
        switches_roles = getattr(disagg, "enable_pd_role_switch", False)  # not in every release
        labels = {
            "model_name": get_serving().served_model_name,
            "engine_type": "dynamic"
            if switches_roles
            else DisaggregationMode.to_engine_type(disagg.disaggregation_mode),
            "tp_rank": parallel.tp_rank,
            "pp_rank": parallel.pp_rank,
            "moe_ep_rank": 0 if parallel.tp_size == 1 else parallel.moe_ep_rank,
        }
        dp_rank = getattr(parallel, "dp_rank", None)  # SGLang 0.5.17 says it when the labels are made already
        labels |= {} if dp_rank is None else {"dp_rank": dp_rank}
        labels |= getattr(get_observability(), "extra_metric_labels", None) or {}
        return {name: str(value) for name, value in labels.items()}
    except Exception as error:
        logger.warning("flashsample: metrics have no labels of SGLang: %s: %s", type(error).__name__, error)
        return {}


def unsupported_screens(mode: ScreenMode) -> str | None:
    """Why no head of this server may have a screen, as far as its arguments say."""
    if mode is ScreenMode.OFF:
        return f"{SCREEN_VARIABLE} is off"
    try:
        if support.is_deterministic():
            return "what a screen reads depends on the batch"
        return support.unsupported_screens()
    except Exception as error:  # an SGLang whose configuration we cannot read
        return f"this server's configuration cannot be read ({error})"
