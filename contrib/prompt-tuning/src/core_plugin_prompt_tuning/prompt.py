"""Virtual tokens at a model's door.

The model gets ids for them, before its own ones, and the embeddings of these are replaced. So all
that it makes of ids (positions, masks, lengths) is right; what it returns for them is taken away.
"""

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from core_plugin.adapters.layer import AdapterParameters, ModelAdapter
from core_plugin.adapters.roles import input_embeddings
from core_plugin.adapters.tree import Sites
from core_plugin.tensors import call_whole
from core_plugin.types.model import IGNORED
from core_plugin_prompt_tuning.plugin import PromptTuningParams


class Prompt(ModelAdapter):
    """The virtual tokens of a model's adapters: ``[num_virtual_tokens, dim]`` each."""

    child = "prompt_encoder"

    @classmethod
    def fault(cls, model: nn.Module, params: PromptTuningParams) -> str | None:
        """See :meth:`ModelAdapter.fault`."""
        found = [site.path for site in input_embeddings(Sites(model))]
        if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
            return "prompt_tuning is not for a model with an encoder and a decoder"
        lead = "prompt_tuning needs one embedding of tokens, as of get_input_embeddings(), and has "
        return None if len(found) == 1 else f"{lead}{', '.join(found) or 'none'}"

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.prompt_embeddings = AdapterParameters(nn.init.normal_)
        self._embedding: Any = [site.base for site in input_embeddings(Sites(model))]  # no child
        self._names = list(inspect.signature(model.forward).parameters)
        # The number of virtual tokens; of those that a pass puts in; of all tokens in it then.
        self._count = self._new = self._length = 0

    def add_adapter(self, name: str, params: PromptTuningParams) -> None:
        """See :meth:`ModelAdapter.add_adapter`."""
        (embedding,), tokens = self._embedding, params.num_virtual_tokens
        self.prompt_embeddings.add(name, (tokens, embedding.weight.shape[1]), embedding)

    def initialize(self, name: str) -> None:
        """See :meth:`ModelAdapter.initialize`."""
        if self.params[name].prompt_tuning_init == "SAMPLE_VOCAB":
            (embedding,), own = self._embedding, self.prompt_embeddings[name].detach()
            tokens = torch.randint(len(embedding.weight), (len(own),))
            own.copy_(call_whole(embedding, tokens.to(own.device)))

    def settle(self) -> None:
        """See :meth:`ModelAdapter.settle`."""
        self._count = sum(self.params[name].num_virtual_tokens for name in self.used)

    def attach(self, model: nn.Module) -> None:
        """See :meth:`ModelAdapter.attach`."""
        self.hooks = [
            model.register_forward_pre_hook(self._lengthen, with_kwargs=True),
            self._embedding[0].register_forward_hook(self._replace),
            model.register_forward_hook(self._shorten, always_call=True),
        ]

    def _lengthen(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        if not self._count:
            return None
        inputs = {**dict(zip(self._names, args, strict=False)), **kwargs}
        cache = inputs.get("cache", inputs.get("past_key_values"))
        filled = cache is not None and cache.get_seq_length() > 0  # with the virtual tokens, too
        self._new = new = 0 if filled else self._count
        ids = "input_ids" if "input_ids" in inputs else self._names[0]
        pads = {ids: 0, "token_type_ids": 0, "position_ids": 0, "labels": IGNORED}
        for name in [name for name in pads if inputs.get(name) is not None]:
            inputs[name] = nn.functional.pad(inputs[name], (new, 0), value=pads[name])
        if (positions := inputs.get("position_ids")) is not None:
            positions[..., new:] += self._count
            positions[..., :new] = torch.arange(new)
        if (mask := inputs.get("attention_mask")) is not None:
            inputs["attention_mask"] = nn.functional.pad(mask, (self._count, 0), value=1)
        if new and inputs.get("inputs_embeds") is not None:
            inputs["inputs_embeds"] = self._prepend(inputs["inputs_embeds"])
        positional = [inputs.pop(name) for name in self._names[: len(args)]]
        return (*positional, *args[len(positional) :]), inputs

    def _replace(self, embedding: nn.Module, args: Any, output: Tensor) -> Tensor | None:
        return self._prepend(output[:, self._new :]) if self._new else None

    def _prepend(self, embeddings: Tensor) -> Tensor:
        prompt = torch.cat([self.prompt_embeddings[name] for name in self.used])
        prompt = prompt.to(embeddings.dtype).expand(len(embeddings), -1, -1)
        self._length = embeddings.shape[1] + self._new
        return torch.cat([prompt, embeddings], dim=1)

    def _shorten(self, model: nn.Module, args: Any, output: Any) -> Any:
        new, self._new = self._new, 0
        parts = output if isinstance(output, dict) else {"logits": output}
        for name, part in parts.items() if new else ():
            if isinstance(part, Tensor) and part.dim() > 2 and part.shape[1] == self._length:
                parts[name] = part[:, new:]
        return output if isinstance(output, dict) else parts["logits"]
