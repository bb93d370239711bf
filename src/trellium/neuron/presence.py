"""Whether the emulated device should be there, and its arrival.

Called once, while `import torch` is still running, so it looks and imports as little as it can. What it decides is kept as a sentence for
`trellium env`; it never raises for something a user of plain torch has not asked for.
"""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import json
import os
import sys
import sysconfig
import types
from pathlib import Path

import torch

INSTALL_HINT = "pip install --no-build-isolation --force-reinstall --no-deps trellium"


def reason_to_step_aside() -> str | None:
    """Why something else should have the name `neuron` or the place of torch's accelerator; None if nothing should."""
    if os.environ.get("TRELLIUM_NEURON", "").strip() == "0":
        return "TRELLIUM_NEURON=0 is set."
    if (origin := _real_torch_neuronx()) is not None:
        return f"the vendor's torch_neuronx is installed ({origin}); it drives the real device, and the emulation steps aside."
    taken = torch._C._get_privateuse1_backend_name()
    if taken != "privateuseone":
        return f"torch has one place for a device from outside (PrivateUse1), and the backend {taken!r} has it already."
    if os.environ.get("TRELLIUM_NEURON", "").strip() != "1" and (other := _other_accelerator()) is not None:
        return (
            f"this machine has a {other} device, and an emulated one would take its place as torch.accelerator. "
            "TRELLIUM_NEURON=1 loads the emulation all the same."
        )
    return None


def take_the_name() -> str | None:
    """Load the extension and make it torch's `neuron` device.

    Returns:
        None when that is done, else the reason why it cannot be, with the way out.
    """
    if (reason := _extension_mismatch()) is not None:
        return reason
    try:
        extension = importlib.import_module("trellium.neuron._C")
    except ImportError as error:
        return f"the extension does not load ({error}). Rebuild it: {INSTALL_HINT}"
    from trellium.neuron import contract
    from trellium.neuron.instances import current_instance

    try:
        instance = current_instance()
        contract.install()
    except ValueError as error:  # an environment variable that cannot be; an InstanceError is one
        return str(error)
    extension.initialize(
        cores=instance.cores,
        bytes_per_core=instance.hbm_bytes_per_core,
        core_name=instance.core_name,
        instance=instance.instance_type,
    )
    torch.utils.rename_privateuse1_backend("neuron")
    from trellium.neuron import amp, default_backend, device_module, exchange, safetensors_bridge

    torch._register_device_module("neuron", device_module)
    torch.utils.generate_methods_for_privateuse1_backend(
        for_tensor=True, for_module=True, for_packed_sequence=True, for_storage=True
    )
    _present_torch_neuronx(device_module)
    amp.install()
    exchange.install()
    default_backend.install()
    safetensors_bridge.install()
    # transformers' asynchronous loader hangs on the real device; the rest of what is set for users waits for the first graph (compile_settings).
    os.environ.setdefault("HF_DEACTIVATE_ASYNC_LOAD", "1")
    return None


def _real_torch_neuronx() -> str | None:
    """Where the vendor's package is, or None."""
    try:
        spec = importlib.util.find_spec("torch_neuronx")
    except (ImportError, ValueError):
        spec = None
    if spec is None:
        return None
    return spec.origin or str(next(iter(spec.submodule_search_locations or []), "torch_neuronx"))


def _other_accelerator() -> str | None:
    """The type of an accelerator this torch was built for and finds a device of; None if there is none."""
    accelerator = torch.accelerator.current_accelerator()
    if accelerator is None:
        return None
    # Counting does not initialise a GPU (torch asks NVML), so a later fork stays possible.
    return accelerator.type if torch.get_device_module(accelerator).device_count() > 0 else None


def _extension_mismatch() -> str | None:
    """Why the built extension may not be loaded into this torch: C++ interfaces differ between builds, and a wrong one crashes."""
    folder = Path(__file__).parent
    if not any((folder / f"_C{suffix}").exists() for suffix in importlib.machinery.EXTENSION_SUFFIXES):
        built = sorted(folder.glob("_C.*.so"))
        if built:
            return f"the extension was built for another Python ({built[0].name}). Rebuild it: {INSTALL_HINT}"
        return (
            "the extension was not built: there was no C++ compiler, or the build could not see torch. Install a C++20 compiler "
            f"(g++ 11 or newer, or clang++) and reinstall with `{INSTALL_HINT}`."
        )
    try:
        built_for = json.loads((folder / "_built_for.json").read_text())
    except (OSError, ValueError) as error:
        return f"it is not known which torch the extension was built for ({error}). Rebuild it: {INSTALL_HINT}"
    here = {
        "torch": torch.__version__,
        "torch_git": torch.version.git_version,
        "python": sysconfig.get_config_var("SOABI"),
    }
    different = [
        f"{name} {built_for.get(name)}, here {here[name]}" for name in here if built_for.get(name) != here[name]
    ]
    if different:
        return f"the extension was built for {'; '.join(different)}. Rebuild it: {INSTALL_HINT}"
    return None


class _EmulatedTorchNeuronx(types.ModuleType):
    """`torch_neuronx`, EMULATED by Trellium: not the vendor's package.

    transformers and accelerate use a `neuron` device only if a package of this name can be imported. It holds what `torch.neuron` holds,
    and has no file.
    """

    def __getattr__(self, name: str):
        # Dunder names are looked up by import machinery and inspection; `torch.neuron`'s would be wrong answers.
        if not (name.startswith("__") and name.endswith("__")):
            try:
                return getattr(sys.modules["torch.neuron"], name)
            except AttributeError:
                pass
        raise AttributeError(
            f"the emulated torch_neuronx (Trellium's, not the vendor's) has no attribute {name!r}; it holds what torch.neuron holds"
        )

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *(name for name in dir(sys.modules["torch.neuron"]) if name[0] != "_")})


def _present_torch_neuronx(device_module: types.ModuleType) -> None:
    """Put the emulated module where `find_spec` and `import` find it. The real one is known not to be there."""
    module = _EmulatedTorchNeuronx("torch_neuronx", _EmulatedTorchNeuronx.__doc__)
    spec = importlib.machinery.ModuleSpec("torch_neuronx", loader=None, origin="emulated by trellium", is_package=True)
    module.__spec__ = spec
    module.__path__ = []  # a package with nothing on disk
    vars(module).update(__version__="0+emulated.by.trellium", utils=device_module.utils)
    sys.modules["torch_neuronx"] = module
    sys.modules["torch_neuronx.utils"] = device_module.utils
