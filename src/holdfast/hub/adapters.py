"""A class that an object can change to without ceasing to be what it was.

Router state in PEFT's adapters: saved with an adapter, loaded with it, and switched when another adapter is.

A router's state (an expert graph, a strip's width) is buffers, which belong to no adapter: PEFT writes its own weights only.
It asks modules of one kind, `AuxiliaryTrainingWrapper`, for more. A changed model gets one such module, `router_state`, as
soon as PEFT has put an adapter on it.
"""

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.routing import Router
from holdfast.routing.state import StatefulPart

_made: dict[tuple[Any, Any], Any] = {}


def with_mixin(kind: Any, mixin: Any) -> Any:
    """`kind` with `mixin` in front, under its own name and in its own module; always the same one."""
    if (kind, mixin) not in _made:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce}
        _made[kind, mixin] = type(kind.__name__, (mixin, kind), names)
    return _made[kind, mixin]


def without_mixin(kind: Any) -> Any:
    """The class that `with_mixin` was given."""
    return kind.__bases__[1]


def _reduce(thing: Any, protocol: Any) -> tuple[Any, ...]:
    """For copies and pickles: the class cannot be found by its name, which is another's, but made again."""
    made = type(thing)
    _, _, *state = super(made, thing).__reduce_ex__(max(protocol, 2))
    return _blank, (without_mixin(made), made.__bases__[0]), *state


def _blank(kind: Any, mixin: Any) -> Any:
    made = with_mixin(kind, mixin)
    return made.__new__(made)


NAME = "router_state"
COPIES = ("modules_to_save", "original_module")  # PEFT saves its copies of modules itself, with the routers inside

State = dict[str, Tensor]


class CarriesRouterState:
    """Mixed into changed models: PEFT announces itself to a model by setting `peft_config`."""

    @property
    def peft_config(self) -> Any:
        if "peft_config" not in self.__dict__:
            raise AttributeError("peft_config")
        return self.__dict__["peft_config"]

    @peft_config.setter
    def peft_config(self, configs: Any) -> None:
        self.__dict__["peft_config"] = configs
        carry_state(self)

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["peft_config"]
        self.__dict__["_modules"].pop(NAME, None)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """As any module's. Prompt tuning, which puts nothing into a model, is recognised by the name it gives to it."""
        if options.get("prefix") == "base_model." and "peft" in sys.modules and has_state(self):
            warnings.warn(
                "PEFT's prompt tuning saves prompts only, not what routers have learnt: save the model as well, with "
                "holdfast.save(model.base_model, folder), and load the prompts onto that.",
                stacklevel=2,
            )
        return super().state_dict(*arguments, **options)  # type: ignore[misc]

    def load_adapter(self, peft_model_id: Any = None, *arguments: Any, **options: Any) -> Any:
        """As transformers does, which does not load what PEFT's modules of other kinds saved."""
        loaded = super().load_adapter(peft_model_id, *arguments, **options)  # type: ignore[misc]
        given = options.get("adapter_state_dict")
        if given is None and peft_model_id is not None:
            from peft.utils import load_peft_weights

            given = load_peft_weights(peft_model_id, device="cpu")
        marked = {key[key.index(f"{NAME}.") :]: value for key, value in (given or {}).items() if f"{NAME}." in key}
        self.__dict__["_modules"][NAME].load(marked, f"{NAME}.")
        return loaded


def has_state(model: Any) -> bool:
    """Whether routers of the model learn without gradients."""
    return any(isinstance(part, StatefulPart) for part in model.modules())


def carry_state(model: Any) -> None:
    """Make the adapters of a model carry the state of its routers."""
    if "peft_config" in model.__dict__ and NAME not in model._modules:
        from peft.utils import AuxiliaryTrainingWrapper

        first = {NAME: with_mixin(AuxiliaryTrainingWrapper, RouterState)(model)}
        others = dict(model._modules)
        model._modules.clear()
        model._modules.update({**first, **others})  # before all others: what it refuses, PEFT has then not begun


def running(module: Any) -> Any:
    """Return the module that runs: of one that PEFT has copied (`modules_to_save`), the copy of the active adapter."""
    if isinstance(module, Router) or "modules_to_save" not in module._modules:
        return module
    copies, active = module.modules_to_save, module.active_adapters
    return module.original_module if module.disable_adapters or not active or active[0] not in copies else copies[active[0]]


class RouterState:
    """Mixed into PEFT's `AuxiliaryTrainingWrapper`. One adapter's state is in the routers, the others' are kept here.

    Without adapters (`disable_adapter`, as for a reference model) routers have the state that they had before any.
    """

    def __init__(self, model: nn.Module) -> None:
        nn.Module.__init__(self)  # type: ignore[arg-type]
        self.__dict__["model"] = model  # past nn.Module's bookkeeping: this is a part of the model
        self._active_adapter, self._disable_adapters = _active(model)
        self.expected: str | None = None  # the adapter that PEFT is about to load
        # Whose state the routers have; None is the model's without adapters.
        self.current: str | None = None if self._disable_adapters or not self._active_adapter else self._active_adapter[0]
        self.states: dict[str | None, State] = {None: _copied(self._buffers_of_routers())}
        self.replaced: dict[str | None, State] = {None: {}}  # parameters of routers, where an adapter was loaded with others
        self.added: dict[str, tuple[str, State, State]] = {}  # the active adapter, its state and `replaced`, at the time

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """Raise when PEFT announces a batch with an adapter for each row (`adapter_names`)."""
        if "adapter_names" in getattr(hook, "keywords", {}) and self._is_of_one_adapter():
            raise ValueError(
                "rows of one batch have different adapters (adapter_names), but routers have one state and read one "
                "projection for all rows; run a batch for each adapter."
            )
        return nn.Module.register_forward_pre_hook(self, hook, **options)  # type: ignore[arg-type]

    def _is_of_one_adapter(self) -> bool:
        """Whether routes depend on which adapter is active."""
        if self._buffers_of_routers() or self._parameters_of_routers():
            return True
        return any("attention.projection" in router.reads for _, router in self._routers())

    def __getattr__(self, name: str) -> Any:
        """Not PEFT's, which looks on in a wrapped module: there is none."""
        return nn.Module.__getattr__(self, name)  # type: ignore[arg-type]

    @property
    def _adapters(self) -> set[str]:
        return set(self.__dict__["model"].peft_config)

    def _get_available_adapters(self) -> set[str]:
        return self._adapters

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        names = [adapter_name] if isinstance(adapter_name, str) else adapter_name
        return names[0] if names else None

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        self._active_adapter = names[:1]
        self._note_added()
        if not self._disable_adapters:
            self._switch(names[0] if names else None)

    def enable_adapters(self, enabled: bool) -> None:
        self._disable_adapters = not enabled
        self._switch(self._active_adapter[0] if enabled and self._active_adapter else None)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        if adapter_name in self._active_adapter:
            self.set_adapter(new_active_adapters or [])
        for kept in (self.states, self.replaced, self.added):
            kept.pop(adapter_name, None)  # type: ignore[attr-defined]

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: Any) -> nn.Module:
        """The model stays without adapters: with the state of the merged one, or with that from before any."""
        if not merge:
            self._switch(None)
        return self  # type: ignore[return-value]

    def adapter_state_dict(self, adapter_name: str, state_dict: Any = None) -> State:
        """What is written with an adapter. A name has no dots, in which PEFT would look for those of adapters."""
        with self._switched(adapter_name):
            for _, router in self._routers():
                for part in router.modules():
                    if isinstance(part, StatefulPart):
                        part.commit()
            tensors = {**self._buffers_of_routers(), **self._parameters_of_routers()}
            return {name.replace(".", "/"): tensor for name, tensor in _copied(tensors).items()}

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        self.expected = adapter_name
        return {}

    def _load_from_state_dict(self, state_dict: State, prefix: str, *rest: Any) -> None:
        self.load(state_dict, prefix)

    def load(self, state_dict: State, prefix: str) -> None:
        """Take an adapter's state, into the routers or, while another adapter is active, for later."""
        adapter, self.expected = self.expected, None
        marked = {key.removeprefix(prefix): value for key, value in state_dict.items() if key.startswith(prefix)}
        given = {name.replace("/", "."): value for name, value in marked.items()}
        buffers, parameters = self._buffers_of_routers(), self._parameters_of_routers()
        own = {**buffers, **parameters}
        if not given:
            if adapter is not None and own:
                warnings.warn(
                    "this adapter holds no state of routers (it was saved from a model without them, or by an older "
                    "Holdfast): its routers start from the model's own state.",
                    stacklevel=2,
                )
            return
        _require_fitting(given, own)
        adapter = self.current if adapter is None else adapter
        base = {**parameters, **self.replaced[None]}
        other = {name: given[name] for name in parameters if not torch.equal(given[name].to(base[name]), base[name])}
        for name in other:
            self.replaced[None].setdefault(name, base[name].detach().clone())
        if adapter == self.current:
            _fill(buffers, given)
            _fill(parameters, {**{name: base[name] for name in self.replaced.get(adapter, {})}, **other})
        else:
            self.states[adapter] = {name: given[name] for name in buffers}
        self.replaced[adapter] = other

    def _switch(self, adapter: str | None) -> None:
        """Give the routers another adapter's state, uncommitted as it is: a backward may still recompute a forward."""
        if adapter == self.current:
            return
        self._take_copied_state(adapter)
        buffers, parameters = self._buffers_of_routers(), self._parameters_of_routers()
        if self.current is not None:  # what forwards without adapters did to state is not kept
            self.states[self.current] = _copied(buffers)
            kept = self.replaced.get(self.current, {})
            self.replaced[self.current] = _copied({name: parameters[name] for name in kept})
        _fill(buffers, self.states.get(adapter, self.states[None]))
        former = self.replaced.get(self.current, {}).keys()
        wanted = self.replaced.get(adapter, {}) if adapter is not None else {}
        _fill(parameters, {name: wanted.get(name, self.replaced[None][name]) for name in {*former, *wanted}})
        self.current = adapter

    def _note_added(self) -> None:
        """Keep the state of the active adapter for adapters that PEFT has just added: one may become its copy."""
        if self.current is None:
            return
        for name in self._adapters - self.states.keys() - self.added.keys() - {self.current}:
            parameters = self._parameters_of_routers()
            replaced = _copied({name: parameters[name] for name in self.replaced.get(self.current, {})})
            self.added[name] = (self.current, _copied(self._buffers_of_routers()), replaced)

    def _take_copied_state(self, adapter: str | None) -> None:
        """Give an adapter that is a copy of another the state that the other had when it was added.

        TRL makes a reference so: it adds an adapter, `ref`, and copies the parameters of the one that is to be trained.
        """
        if adapter is None or adapter not in self.added or adapter in self.states:
            return
        copied_from, state, replaced = self.added.pop(adapter)
        if _are_equal(self.__dict__["model"], adapter, copied_from):
            self.states[adapter], self.replaced[adapter] = state, replaced

    @contextmanager
    def _switched(self, adapter: str) -> Iterator[None]:
        before = self.current
        self._switch(adapter)
        try:
            yield
        finally:
            self._switch(before)

    def _routers(self) -> Iterator[tuple[str, Router]]:
        """Routers by their names in a model without adapters; those that PEFT has copied are saved by PEFT."""
        for name, module in self.__dict__["model"].named_modules():
            if isinstance(module, Router) and not any(step in COPIES for step in name.split(".")):
                yield _plain_name(name), module

    def _buffers_of_routers(self) -> State:
        found = {}
        for router_name, router in self._routers():
            for name, part in router.named_modules():
                for buffer_name, buffer in part._buffers.items():
                    if buffer is not None and buffer_name not in part._non_persistent_buffers_set:
                        found[_plain_name(f"{router_name}.{name}.{buffer_name}")] = buffer
        return found

    def _parameters_of_routers(self) -> State:
        """Without those of adapters."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        found: State = {}
        for router_name, router in self._routers():
            layers = [(name, part) for name, part in router.named_modules() if isinstance(part, BaseTunerLayer)]
            added = [f"{name}.{child}." for name, layer in layers for child in layer._modules if child != "base_layer"]
            for name, parameter in router.named_parameters():
                if not name.startswith(tuple(added)):
                    found[_plain_name(f"{router_name}.{name}")] = parameter
        return found


def _active(model: nn.Module) -> tuple[list[str], bool]:
    """The active adapter, if any, and whether adapters are disabled."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    for module in model.modules():
        if isinstance(module, BaseTunerLayer):
            return list(module.active_adapters)[:1], bool(module.disable_adapters)
    return [], False


def _are_equal(model: nn.Module, adapter: str, other: str) -> bool:
    """Whether two adapters have the same parameters."""
    parameters = dict(model.named_parameters())
    pairs = [
        (value, parameters.get(f"{name}.".replace(f".{other}.", f".{adapter}.").removesuffix(".")))
        for name, value in parameters.items()
        if f".{other}." in f"{name}."
    ]
    return bool(pairs) and all(copy is not None and torch.equal(value, copy) for value, copy in pairs)


def _plain_name(name: str) -> str:
    """A name without what PEFT's wrappers put in between."""
    return ".".join(step for step in name.split(".") if step not in ("", "base_layer"))


def _copied(tensors: State) -> State:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _fill(tensors: State, values: State) -> None:
    for name, value in values.items():
        if name in tensors:
            tensors[name].copy_(value)


def _require_fitting(given: State, own: State) -> None:
    """Raise where an adapter's state is of other routers than the model has."""
    for name in chain(sorted(given.keys() ^ own.keys()), sorted(given)):
        if name not in own or name not in given or own[name].shape != given[name].shape:
            raise ValueError(
                f"this adapter was trained with other routers than the model has ({name} does not fit); give the model the "
                "routers of the adapter's own base (reroute, or holdfast.load of its folder) before loading it."
            )
