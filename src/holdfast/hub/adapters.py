"""Router state in PEFT's adapters: saved with an adapter, loaded with it, and switched when another adapter is activated.

A router's state (an expert graph, a strip's width) is in buffers, and PEFT saves only its own weights with an adapter. But
it calls `adapter_state_dict` of modules of the class `AuxiliaryTrainingWrapper`. A changed model gets one such module,
`router_state`, as soon as PEFT puts an adapter on it.

`with_mixin` is used all over this package: it gives an object a subclass of its class that has the same name.
"""

import os
import sys
import warnings
from collections.abc import Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from holdfast.routing import Router
from holdfast.routing.state import StatefulPart

State = dict[str, Tensor]

ROUTER_STATE = "router_state"  # the name of the module
COPIES = ("modules_to_save", "original_module")  # PEFT saves these copies of modules itself, with the routers inside
_classes: dict[tuple[Any, Any], Any] = {}


def with_mixin(kind: Any, mixin: Any) -> Any:
    """Return a class with the bases `mixin` and `kind`, and the name and module of `kind`; always the same class."""
    if (kind, mixin) not in _classes:
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__, "__reduce_ex__": _reduce}
        _classes[kind, mixin] = type(kind.__name__, (mixin, kind), names)
    return _classes[kind, mixin]


def without_mixin(kind: Any) -> Any:
    """Return the class that `with_mixin` was given."""
    return kind.__bases__[1]


def original_class(kind: Any) -> Any:
    """Return the class of another library that a class of `with_mixin` was made from; any other class is returned."""
    while vars(kind).get("__reduce_ex__") is _reduce:
        kind = without_mixin(kind)
    return kind


def _reduce(thing: Any, protocol: Any) -> tuple[Any, ...]:
    """Support copies and pickles: the class has the name of its base and is not found by it, so it is made again."""
    made = type(thing)
    _, _, *state = super(made, thing).__reduce_ex__(max(protocol, 2))
    return _new_instance, (without_mixin(made), made.__bases__[0]), *state


def _new_instance(kind: Any, mixin: Any) -> Any:
    made = with_mixin(kind, mixin)
    return made.__new__(made)


class SavesRouterState:
    """Mixin for changed models: adds the module `router_state` when PEFT sets `peft_config` on the model."""

    @property
    def peft_config(self) -> Any:
        if "peft_config" not in self.__dict__:
            raise AttributeError("peft_config")
        return self.__dict__["peft_config"]

    @peft_config.setter
    def peft_config(self, configs: Any) -> None:
        self.__dict__["peft_config"] = configs
        add_router_state(self)

    @peft_config.deleter
    def peft_config(self) -> None:
        del self.__dict__["peft_config"]
        self.__dict__["_modules"].pop(ROUTER_STATE, None)

    def state_dict(self, *arguments: Any, **options: Any) -> Any:
        """Return the state dict; warn under prompt tuning, which is recognised by the prefix that PEFT uses for it.

        With `cpu_ram_efficient_loading`, accelerate moves a model to `meta`, shards it, and sends the entries of this
        dictionary from the first rank to the others. It can send sharded parameters only: raise ValueError.
        """
        parts = [part for part in self.modules() if isinstance(part, StatefulPart)]  # type: ignore[attr-defined]
        if options.get("prefix") == "base_model." and "peft" in sys.modules and parts:
            warnings.warn(
                "PEFT's prompt tuning saves prompts only, not the router state: save the model as well, with "
                "holdfast.save(model.base_model, folder), and load the prompts for that model.",
                stacklevel=2,
            )
        is_sharded = any(hasattr(weight, "device_mesh") for weight in self.parameters())  # type: ignore[attr-defined]
        on_meta = is_sharded and any(buffer.is_meta for part in parts for buffer in part.buffers())
        if on_meta and os.environ.get("FSDP_CPU_RAM_EFFICIENT_LOADING", "").lower() == "true":
            raise ValueError("accelerate cannot send router state to other ranks: set cpu_ram_efficient_loading to false.")
        return super().state_dict(*arguments, **options)  # type: ignore[misc]

    def load_adapter(self, peft_model_id: Any = None, *arguments: Any, **options: Any) -> Any:
        """Load an adapter as transformers does, and its router state, which transformers would skip."""
        loaded = super().load_adapter(peft_model_id, *arguments, **options)  # type: ignore[misc]
        given = options.get("adapter_state_dict")
        if given is None and peft_model_id is not None:
            from peft.utils import load_peft_weights

            given = load_peft_weights(peft_model_id, device="cpu")
        marked = {
            key[key.index(f"{ROUTER_STATE}.") :]: value for key, value in (given or {}).items() if f"{ROUTER_STATE}." in key
        }
        self.__dict__["_modules"][ROUTER_STATE]._load_from_state_dict(marked, f"{ROUTER_STATE}.")
        return loaded


def add_router_state(model: Any) -> None:
    """Add the module `router_state` to a model with adapters."""
    if "peft_config" in model.__dict__ and ROUTER_STATE not in model._modules:
        from peft.utils import AuxiliaryTrainingWrapper

        # Before all others, so that it raises before PEFT changes anything.
        first = {ROUTER_STATE: with_mixin(AuxiliaryTrainingWrapper, RouterState)(model)}
        model.__dict__["_modules"] = {**first, **model._modules}


def active_module(module: Any) -> Any:
    """Return the module that runs: the active adapter's copy, if PEFT has copied the module (`modules_to_save`)."""
    if isinstance(module, Router) or "modules_to_save" not in module._modules:
        return module
    copies, active = module.modules_to_save, module.active_adapters
    return module.original_module if module.disable_adapters or not active or active[0] not in copies else copies[active[0]]


class RouterState:
    """Mixin for PEFT's `AuxiliaryTrainingWrapper`: the active adapter's state is in the routers, that of others here.

    Without adapters (`disable_adapter`, as for a reference model) routers have the state from before the first adapter.
    """

    def __init__(self, model: nn.Module) -> None:
        from peft.tuners.tuners_utils import BaseTunerLayer

        nn.Module.__init__(self)  # type: ignore[arg-type]
        self.__dict__["model"] = model  # not registered as a submodule: the model contains this module
        tuned = next((module for module in model.modules() if isinstance(module, BaseTunerLayer)), None)
        self._active_adapter = [] if tuned is None else list(tuned.active_adapters)[:1]
        self._disable_adapters = tuned is not None and bool(tuned.disable_adapters)
        self.expected: str | None = None  # the adapter that PEFT loads next
        # The adapter whose state is in the routers; None: the state without adapters.
        self.current: str | None = None if self._disable_adapters or not self._active_adapter else self._active_adapter[0]
        self.states: dict[str | None, State] = {None: _copies_of(self._buffers_of_routers())}
        # Router parameters in which a loaded adapter differs from the model.
        self.own_parameters: dict[str | None, State] = {None: {}}
        # When an adapter was added: the active adapter, its state and its `own_parameters`.
        self.added: dict[str, tuple[str, State, State]] = {}

    def register_forward_pre_hook(self, hook: Any, **options: Any) -> Any:
        """Raise ValueError when PEFT registers a hook for a batch with an adapter for each row (`adapter_names`)."""
        has_tensors = bool(self._buffers_of_routers() or self._parameters_of_routers())
        depends = has_tensors or any("attention.projection" in router.reads for _, router in self._routers())
        if "adapter_names" in getattr(hook, "keywords", {}) and depends:
            raise ValueError(
                "rows of one batch have different adapters (adapter_names), but routers have one state and read one "
                "projection for all rows; run a batch for each adapter."
            )
        return nn.Module.register_forward_pre_hook(self, hook, **options)  # type: ignore[arg-type]

    def __getattr__(self, name: str) -> Any:
        """Look attributes up as `nn.Module` does. PEFT's method also looks in a wrapped module, and there is none."""
        return nn.Module.__getattr__(self, name)  # type: ignore[arg-type]

    @property
    def _adapters(self) -> set[str]:  # PEFT reads this
        return set(self.__dict__["model"].peft_config)

    def _get_available_adapters(self) -> set[str]:
        return self._adapters

    def check_set_adapter(self, adapter_name: str | list[str]) -> str | None:
        """Return the adapter that `set_adapter` would activate."""
        return next(iter([adapter_name] if isinstance(adapter_name, str) else adapter_name), None)

    def set_adapter(self, adapter_names: str | list[str], inference_mode: bool = False) -> None:
        """Make an adapter the active one: PEFT calls this for each of its modules."""
        names = [adapter_names] if isinstance(adapter_names, str) else adapter_names
        self._active_adapter = names[:1]
        added = self._adapters - self.states.keys() - self.added.keys() - {self.current}
        for name in added if self.current is not None else ():  # it may become a copy of the active adapter
            assert self.current is not None
            parameters = self._parameters_of_routers()
            own_parameters = _copies_of({name: parameters[name] for name in self.own_parameters.get(self.current, {})})
            self.added[name] = (self.current, _copies_of(self._buffers_of_routers()), own_parameters)
        if not self._disable_adapters:
            self._switch(names[0] if names else None)

    def enable_adapters(self, enabled: bool) -> None:
        """Switch to the active adapter's state, or to the state without adapters."""
        self._disable_adapters = not enabled
        self._switch(self._active_adapter[0] if enabled and self._active_adapter else None)

    def delete_adapter(self, adapter_name: str, new_active_adapters: list[str] | None) -> None:
        """Forget an adapter's state; activate another adapter if it was the active one."""
        if adapter_name in self._active_adapter:
            self.set_adapter(new_active_adapters or [])
        for stored in (self.states, self.own_parameters, self.added):
            stored.pop(adapter_name, None)  # type: ignore[attr-defined]

    def unload_and_optionally_merge_module(self, merge: bool, safe_merge: bool, adapter_names: Any) -> nn.Module:
        """Leave the merged adapter's state in the routers, or, without a merge, put the state without adapters there."""
        if not merge:
            self._switch(None)
        return self  # type: ignore[return-value]

    def adapter_state_dict(self, adapter_name: str, state_dict: Any = None) -> State:
        """Return what is saved with an adapter. Names get / for dots: PEFT searches dotted names for adapter names."""
        before = self.current
        self._switch(adapter_name)
        try:
            for _, router in self._routers():
                for part in router.modules():
                    if isinstance(part, StatefulPart):
                        part.commit()
            tensors = _copies_of({**self._buffers_of_routers(), **self._parameters_of_routers()})
        finally:
            self._switch(before)
        return {name.replace(".", "/"): tensor for name, tensor in tensors.items()}

    def adapter_state_dict_load_map(self, adapter_name: str) -> dict[str, str]:
        """Remember the adapter that is loaded next: PEFT calls this before it loads the weights."""
        self.expected = adapter_name
        return {}

    def _load_from_state_dict(self, state_dict: State, prefix: str, *rest: Any) -> None:
        """Load an adapter's state into the routers, or store it while another adapter is active."""
        adapter, self.expected = self.expected, None
        marked = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        given = {key.removeprefix(prefix).replace("/", "."): value for key, value in marked.items()}
        buffers, parameters = self._buffers_of_routers(), self._parameters_of_routers()
        own = {**buffers, **parameters}
        if not given:
            if adapter is not None and own:
                warnings.warn(
                    "this adapter has no router state (it was saved from a model without routers, or by an older "
                    "Holdfast): its routers start from the model's own state.",
                    stacklevel=2,
                )
            return
        for name in chain(sorted(given.keys() ^ own.keys()), sorted(given)):
            if name not in own or name not in given or own[name].shape != given[name].shape:
                raise ValueError(
                    f"this adapter was trained with other routers than the model has ({name} does not fit); give the model "
                    "the routers of the adapter's own base (reroute, or holdfast.load of its folder) before loading it."
                )
        adapter = self.current if adapter is None else adapter
        base = {**parameters, **self.own_parameters[None]}
        differing = {name: given[name] for name in parameters if not torch.equal(given[name].to(base[name]), base[name])}
        for name in differing:
            self.own_parameters[None].setdefault(name, base[name].detach().clone())
        if adapter == self.current:
            _copy_into(buffers, given)
            _copy_into(parameters, {**{name: base[name] for name in self.own_parameters.get(adapter, {})}, **differing})
        else:
            self.states[adapter] = {name: given[name] for name in buffers}
        self.own_parameters[adapter] = differing

    def _switch(self, adapter: str | None) -> None:
        """Put another adapter's state into the routers, without `commit`: a backward may still recompute a forward."""
        if adapter == self.current:
            return
        if adapter is not None and adapter in self.added and adapter not in self.states:
            # A copy of another adapter gets the state that the other had when it was added. TRL makes its reference model
            # so: it adds an adapter `ref` with the parameters of the one that is trained.
            copied_from, state, own_parameters = self.added.pop(adapter)
            if _have_equal_weights(self.__dict__["model"], adapter, copied_from):
                self.states[adapter], self.own_parameters[adapter] = state, own_parameters
        buffers, parameters = self._buffers_of_routers(), self._parameters_of_routers()
        if self.current is not None:  # changes of state by forwards without adapters are dropped
            self.states[self.current] = _copies_of(buffers)
            stored = self.own_parameters.get(self.current, {})
            self.own_parameters[self.current] = _copies_of({name: parameters[name] for name in stored})
        _copy_into(buffers, self.states.get(adapter, self.states[None]))
        outgoing = self.own_parameters.get(self.current, {}).keys()
        incoming = self.own_parameters.get(adapter, {}) if adapter is not None else {}
        names = {*outgoing, *incoming}
        _copy_into(parameters, {name: incoming.get(name, self.own_parameters[None][name]) for name in names})
        self.current = adapter

    def _routers(self) -> Iterator[tuple[str, Router]]:
        """Yield routers with their names in a model without adapters, except for copies, which PEFT saves itself."""
        for name, module in self.__dict__["model"].named_modules():
            if isinstance(module, Router) and not any(step in COPIES for step in name.split(".")):
                yield _name_without_peft(name), module

    def _buffers_of_routers(self) -> State:
        found = {}
        for router_name, router in self._routers():
            for name, part in router.named_modules():
                for buffer_name, buffer in part._buffers.items():
                    if buffer is not None and buffer_name not in part._non_persistent_buffers_set:
                        found[_name_without_peft(f"{router_name}.{name}.{buffer_name}")] = buffer
        return found

    def _parameters_of_routers(self) -> State:
        """Return the parameters of routers, without those of adapters."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        found: State = {}
        for router_name, router in self._routers():
            layers = [(name, part) for name, part in router.named_modules() if isinstance(part, BaseTunerLayer)]
            added = [f"{name}.{child}." for name, layer in layers for child in layer._modules if child != "base_layer"]
            for name, parameter in router.named_parameters():
                if not name.startswith(tuple(added)):
                    found[_name_without_peft(f"{router_name}.{name}")] = parameter
        return found


def _have_equal_weights(model: nn.Module, adapter: str, other: str) -> bool:
    """Whether two adapters have the same parameters."""
    parameters = dict(model.named_parameters())
    pairs = [
        (value, parameters.get(f"{name}.".replace(f".{other}.", f".{adapter}.").removesuffix(".")))
        for name, value in parameters.items()
        if f".{other}." in f"{name}."
    ]
    return bool(pairs) and all(copy is not None and torch.equal(value, copy) for value, copy in pairs)


def _name_without_peft(name: str) -> str:
    """Return a name without the steps that PEFT's wrappers add."""
    return ".".join(step for step in name.split(".") if step not in ("", "base_layer"))


def _copies_of(tensors: State) -> State:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}


@torch.no_grad()
def _copy_into(tensors: State, values: State) -> None:
    for name, value in values.items():
        if name in tensors:
            tensors[name].copy_(value)
