"""Compile the library; everything else about the package is in pyproject.toml."""

import os
import shutil

from setuptools import setup

TORCH = "2.13"
AGAIN = "pip install --no-build-isolation core-plugin-fake-device"

# The build must not load devices that are installed: this one may be, from before.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

try:
    import torch
    from torch.utils.cpp_extension import BuildExtension, CppExtension, include_paths
except ImportError:
    raise SystemExit(
        f"core-plugin-fake-device is compiled for the torch that is installed, and none was found; "
        f"pip install 'torch=={TORCH}.*' setuptools, then {AGAIN}"
    ) from None

if not torch.__version__.startswith(f"{TORCH}."):
    raise SystemExit(
        f"core-plugin-fake-device needs torch {TORCH}, and torch {torch.__version__} is installed; "
        f"pip install 'torch=={TORCH}.*', then {AGAIN}"
    )

if not shutil.which(os.environ.get("CXX", "c++")):
    raise SystemExit(
        f"core-plugin-fake-device needs a C++ compiler, and {os.environ.get('CXX', 'c++')} was not "
        f"found; install g++ (or set CXX), then {AGAIN}"
    )

SOURCES = "src/core_plugin_fake_device/csrc"

setup(
    ext_modules=[
        CppExtension(
            "core_plugin_fake_device._device",
            [f"{SOURCES}/device.cpp", f"{SOURCES}/autocast.cpp"],
            depends=[f"{SOURCES}/{name}" for name in sorted(os.listdir(SOURCES))],
            include_dirs=[f"{path}/kineto" for path in include_paths()[:1]],
            define_macros=[("USE_KINETO", None)],
            extra_compile_args=["-O1", "-g0"],
            py_limited_api=True,
        )
    ],
    cmdclass={"build_ext": BuildExtension.with_options(no_python_abi_suffix=True)},
    options={"bdist_wheel": {"py_limited_api": "cp311"}},
)
