import os
import subprocess
import sys

import pytest

USED = "assert torch.ones(2, device='fake').sum().item() == 2"
EXPLICIT = "from core_plugin_fake_device.plugin import Fake; Fake.register(Fake.Params())"
ORDERS = {
    "torch first": "import torch",
    "the package first": "import core_plugin_fake_device; import torch",
    "registered before": f"{EXPLICIT}; import torch",
    "registered after": f"import torch; {EXPLICIT}",
}


def run(code: str, autoload: str | None, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {n: v for n, v in os.environ.items() if n != "FAKE_DEVICE_AUTOLOAD"}
    if autoload is not None:
        environment["FAKE_DEVICE_AUTOLOAD"] = autoload
    command = [sys.executable, *options, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("order", ORDERS)
def test_the_device_is_there_in_every_order_of_imports(order: str) -> None:
    done = run(f"{ORDERS[order]}; {USED}", "1", "-W", "error")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["runtime", "fakeccl"])
def test_a_module_that_imports_torch_leaves_the_registration_for_later(name: str) -> None:
    code = (
        f"import core_plugin_fake_device.{name}; import torch; "
        f"assert torch._C._get_privateuse1_backend_name() == 'privateuseone'; {EXPLICIT}; {USED}"
    )
    done = run(code, "1", "-W", "error")
    assert done.returncode == 0, done.stderr


IN_THREADS = """
import threading, time
threads = [threading.Thread(target=exec, args=(code,)) for code in {codes}]
for thread in threads:
    thread.start()
    time.sleep(0.2)
for thread in threads:
    thread.join()
"""


@pytest.mark.parametrize("name", ["runtime", "fakeccl"])
@pytest.mark.parametrize("other", ["import torch", EXPLICIT])
def test_two_threads_do_not_wait_for_each_other(name: str, other: str) -> None:
    threads = IN_THREADS.format(codes=[f"import core_plugin_fake_device.{name}", other])
    done = run(f"{threads}\n{EXPLICIT}; import torch; {USED}", "1", "-W", "error")
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("autoload", [None, "0"])
def test_import_torch_is_as_without_the_package(autoload: str | None) -> None:
    code = (
        "import sys, torch; assert not hasattr(torch, 'fake'); "
        "assert torch._C._get_privateuse1_backend_name() == 'privateuseone'; "
        "assert 'core_plugin_fake_device.runtime' not in sys.modules; "
        "assert not torch.accelerator.is_available()"
    )
    done = run(code, autoload, "-W", "error")
    assert done.returncode == 0, done.stderr


def test_a_failure_is_a_warning() -> None:
    code = (
        "import pathlib; from core_plugin_fake_device import plugin; "
        "plugin.LIBRARY = pathlib.Path('nowhere.so'); import torch; print(2)"
    )
    done = run(code, "1")
    assert (done.returncode, done.stdout) == (0, "2\n")
    assert "RuntimeWarning: FAKE_DEVICE_AUTOLOAD: " in done.stderr
    assert "nowhere.so" in done.stderr
