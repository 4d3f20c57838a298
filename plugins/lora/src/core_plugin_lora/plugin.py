"""Low-rank adapters: the method's parameters, and its layer for each kind of base layer."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import TYPE_CHECKING, Any, Literal

from core_plugin.params import require
from core_plugin.types.peft import BasePeft, PeftParams

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Mapping

    from torch import Tensor, nn

    from core_plugin.adapters.layer import AdapterLayer

KEEPS_BASE = ("eva", "gaussian", "orthogonal")
"""The initialisations, besides the default one, that leave the base as it is."""

CHANGES_BASE = re.compile(r"olora|pissa(_niter_\d+)?")
"""The initialisations that take what the new adapter does out of the base's weight."""


@dataclasses.dataclass(frozen=True)
class LoRAParams(PeftParams):
    """The parameters of LoRA."""

    r: int = 8
    """The rank of the update of a weight, at least 1."""
    lora_alpha: int | float = 16
    """What the update is multiplied by, over the rank (see ``use_rslora``); above 0."""
    lora_dropout: float = 0.0
    """The share of a layer's inputs that the adapter does not see in training: 0 to below 1.

    An embedding's inputs are token numbers, of which none is dropped.
    """
    use_rslora: bool = False
    """Divide ``lora_alpha`` by the square root of the rank, not by the rank."""
    use_dora: bool = False
    """Train the length of each output's weights apart from their direction, which is updated."""
    lora_bias: bool = False
    """Give B a bias."""
    bias: Literal["none", "all", "lora_only"] = "none"
    """Which biases of the model are trained too: none, all, or those of layers with an adapter."""
    init_lora_weights: bool | str = True
    """How a new adapter is made.

    True: A uniform, B zero, so that it changes nothing. False: both random, to try things out.
    ``gaussian``: A normal, B zero. ``eva``: like True, until the directions in which the inputs
    vary most are put into A. ``orthogonal``: both random, with product zero. ``pissa``,
    ``pissa_niter_16`` (approximately, in so many iterations) and ``olora``: the principal part of
    the weight, which is taken out of the base's weight for good. An embedding's is as with True,
    except for False.
    """
    rank_pattern: dict[str, int] = dataclasses.field(default_factory=dict)
    """Other ranks, by names of modules as in ``target_modules`` or regular expressions."""
    alpha_pattern: dict[str, int | float] = dataclasses.field(default_factory=dict)
    """Other values of ``lora_alpha``, by names of modules."""
    target_parameters: list[str] | None = None
    """Parameters that get an adapter and are no layer's weight, such as stacked experts'."""
    trainable_token_indices: list[int] | dict[str, list[int]] | None = None
    """The rows of the input embedding that are trained whole; or rows by an embedding's name."""
    ensure_weight_tying: bool = False
    """Keep the copies of tied ``modules_to_save`` tied to each other."""

    def __post_init__(self) -> None:
        super().__post_init__()
        init = self.init_lora_weights
        ranks = {"r": self.r, **{f"rank_pattern: {k!r}": r for k, r in self.rank_pattern.items()}}
        alphas = {f"alpha_pattern: {k!r}": alpha for k, alpha in self.alpha_pattern.items()}
        require(
            *((_is_rank(r), f"{f} is a rank, a whole number of at least 1, got {r!r}")
              for f, r in ranks.items()),
            *((_is_strength(a), f"{f} is a finite number above 0, got {a!r}")
              for f, a in {"lora_alpha": self.lora_alpha, **alphas}.items()),
            (0 <= self.lora_dropout < 1,
             f"lora_dropout is from 0 to below 1, got {self.lora_dropout!r}"),
            (_is_initialization(init),
             "init_lora_weights is true, false, gaussian, orthogonal, eva, olora, pissa or "
             f"pissa_niter_<iterations>, got {init!r}"),
            *((init != "orthogonal" or not _is_rank(r) or r % 2 == 0,
               f"init_lora_weights is orthogonal, which needs even ranks; {f} is {r!r}")
              for f, r in ranks.items()),
            (not (self.lora_bias and self.use_dora), "lora_bias and use_dora do not go together"),
            (not self.lora_bias or isinstance(init, bool),
             f"with lora_bias, init_lora_weights is true or false, got {init!r}"),
            *((all(index >= 0 for index in indices),
               f"trainable_token_indices are numbers of tokens, from 0, got {indices!r}")
              for indices in self._token_indices()),
        )  # fmt: skip

    def _token_indices(self) -> list[list[int]]:
        indices = self.trainable_token_indices or []
        return list(indices.values()) if isinstance(indices, dict) else [indices]

    @property
    def scaling(self) -> float:
        """What the update is multiplied by."""
        return self.lora_alpha / (math.sqrt(self.r) if self.use_rslora else self.r)

    @property
    def changes_base(self) -> bool:
        """Whether ``init_lora_weights`` changes the base's weight."""
        return _changes_base(self.init_lora_weights)


def _is_rank(r: object) -> bool:
    return isinstance(r, int) and not isinstance(r, bool) and r >= 1


def _is_strength(alpha: float) -> bool:
    return math.isfinite(alpha) and alpha > 0


def _is_initialization(init: bool | str) -> bool:
    return isinstance(init, bool) or init in KEEPS_BASE or _changes_base(init)


def _changes_base(init: object) -> bool:
    return isinstance(init, str) and CHANGES_BASE.fullmatch(init) is not None


class LoRA(BasePeft):
    """Trains a low-rank update of each weight: ``W x + B (A x) scaling``.

    LoRA, https://arxiv.org/abs/2106.09685; ``use_rslora``, https://arxiv.org/abs/2312.03732;
    ``use_dora``, https://arxiv.org/abs/2402.09353; PiSSA, https://arxiv.org/abs/2404.02948; OLoRA,
    https://arxiv.org/abs/2406.01775; EVA, https://arxiv.org/abs/2410.07170.
    """

    Params = LoRAParams
    peft_type = "LORA"
    prefix = "lora_"
    mixes = True
    patterns = {"rank_pattern": "r", "alpha_pattern": "lora_alpha"}
    neutral = {
        "alora_invocation_tokens": None,
        "arrow_config": None,
        "corda_config": None,
        "eva_config": None,
        "fan_in_fan_out": False,
        "kasa_config": None,
        "layer_replication": None,
        "loftq_config": {},
        "lora_ga_config": None,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "monteclora_config": None,
        "qalora_group_size": 16,
        "use_bdlora": None,
        "use_qalora": False,
        "velora_config": None,
    }
    # fan_in_fan_out says what the base layer's type says; the last two belong to other settings.
    training_only = frozenset(
        {"eva_config", "fan_in_fan_out", "lora_dropout", "megatron_core", "qalora_group_size"}
    )
    file_defaults = {"lora_alpha": 8}

    @classmethod
    def same_result(cls, field: str, one: Any, other: Any) -> bool:
        """See :meth:`BasePeft.same_result`; most initialisations leave the base as it is."""
        if field == "init_lora_weights" and one != other:
            return all(isinstance(i, bool) or i in KEEPS_BASE for i in (one, other))
        return super().same_result(field, one, other)

    @staticmethod
    def layers() -> Mapping[type[nn.Module | nn.Parameter] | str, type[AdapterLayer]]:
        """See :meth:`BasePeft.layers`."""
        from torch import nn

        from core_plugin_lora.attention import LoRAAttention
        from core_plugin_lora.convolution import LoRAConv
        from core_plugin_lora.embedding import LoRAEmbedding
        from core_plugin_lora.experts import LoRAParameter
        from core_plugin_lora.linear import LoRAConv1D, LoRALinear

        return {
            nn.Linear: LoRALinear,
            "transformers.pytorch_utils.Conv1D": LoRAConv1D,
            nn.Embedding: LoRAEmbedding,
            nn.Conv1d: LoRAConv,
            nn.Conv2d: LoRAConv,
            nn.Conv3d: LoRAConv,
            nn.MultiheadAttention: LoRAAttention,
            nn.Parameter: LoRAParameter,
        }

    @classmethod
    def prepare(
        cls,
        model: nn.Module,
        params: LoRAParams,
        batches: Iterable[Mapping[str, Tensor]],
        forward: Callable[[nn.Module, Any], object],
    ) -> None:
        """See :meth:`BasePeft.prepare`: EVA, with the ranks as they are."""
        if params.init_lora_weights == "eva":
            from core_plugin_lora.eva import initialize_eva

            initialize_eva(model, batches, rho=1.0, forward=forward)
