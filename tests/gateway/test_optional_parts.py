"""What is not installed is named in one line, with how to get it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("missing", "module", "extra"),
    [("ray", "caudex.gateway.ray_serve", "caudex[ray]"), ("grpclib", "caudex.gateway.endpoint_picker", "")],
)
def test_the_gateway_needs_no_optional_part(missing: str, module: str, extra: str) -> None:
    """The gateway is imported without it; only the module that uses it is not."""
    code = f"import sys; sys.modules[{missing!r}] = None; import caudex.gateway.serve; import {module}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    last = run.stderr.strip().splitlines()[-1]
    assert last.startswith(("ImportError", "ModuleNotFoundError"))
    assert extra in last


def test_answering_envoy_without_its_interfaces_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['grpclib'] = None; from caudex.cli import main; "
        "sys.argv = ['caudex', 'route', '--worker', 'http://[::1]:9', '--port', '0', '--ext-proc-port', '9']; main()"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 1
    assert "pip install 'caudex[envoy]'" in run.stderr
    assert "Traceback" not in run.stderr
