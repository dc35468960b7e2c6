"""`dflash2-mlx doctor`: what this machine has, and whether the engine works on it."""

import json
import platform
from dataclasses import asdict
from importlib import metadata
from typing import Annotated, Any

import typer

from dflash2_mlx.blas import blas_in_force, preload_blas
from dflash2_mlx.cli.console import out, write
from dflash2_mlx.errors import DFlashError
from dflash2_mlx.folders import cache_root
from dflash2_mlx.machine import physical_memory

PACKAGES = ("dflash2-mlx", "mlx", "mlx-lm", "transformers", "huggingface-hub")


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Look at this machine, and try the engine on a tiny random model."""
    checks = _self_test()
    report = {
        **_machine(),
        "packages": {name: _version(name) for name in PACKAGES},
        "blas": _blas(),
        "cache": str(cache_root()),
        "exactness": _exactness(),
        "tuning": _tuning(),
        "memory": _memory_plan(),
        "checks": checks,
        "ok": all(check["ok"] for check in checks),
    }
    if as_json:
        write(json.dumps(report) + "\n")
    else:
        for line in _lines(report):
            out.print(line, markup=False, soft_wrap=True)
    if failed := [check["name"] for check in checks if not check["ok"]]:
        raise DFlashError(f"self-test failed: {', '.join(failed)}; reinstall, or report the above")


def _machine() -> dict[str, Any]:
    device = _device()
    return {
        "platform": platform.platform(),
        "macos": platform.mac_ver()[0] or None,
        "python": f"{platform.python_version()} ({platform.machine()})",
        "chip": device.get("device_name") or platform.processor() or platform.machine(),
        "architecture": device.get("architecture"),
        "memory_bytes": physical_memory(),
        "gpu_memory_bytes": device.get("max_recommended_working_set_size"),
    }


def _device() -> dict[str, Any]:
    """What MLX says of its device; nothing when MLX cannot be loaded, which the checks report."""
    try:
        import mlx.core as mx

        return dict(mx.device_info())
    except Exception:
        return {}


def _exactness() -> list[dict[str, Any]]:
    """What `verify` or `--exact` measured on this machine, for each target."""
    try:
        from dflash2_mlx.exactness import all_known

        return [
            {
                "target": known.target,
                "dtype": known.dtype,
                "equal_widths": list(known.equal_widths),
                "logits_deviation": known.logits.largest,
                "detail": known.describe(),
            }
            for known in all_known()
        ]
    except Exception:
        return []


def _tuning() -> list[dict[str, Any]]:
    """What the tuner decided on this machine, for each pair, and why."""
    try:
        from dflash2_mlx.chip import this_chip
        from dflash2_mlx.decision import decisions, in_words
        from dflash2_mlx.tuning import Store, machine_key

        here = machine_key(this_chip())
        return [
            {
                "key": key,
                "decisions": [asdict(decision) for decision in decisions(known)],
                "detail": in_words(key, known),
            }
            for key, known in Store().entries().items()
            if key.startswith(here)
        ]
    except Exception:
        return []


def _memory_plan() -> dict[str, Any]:
    """What may be used here, the weights found on this machine, and the plans made for pairs."""
    try:
        from dflash2_mlx.budget import made_plans
        from dflash2_mlx.machine import known_weights, this_machine

        machine = this_machine()
        return {
            "limit_bytes": machine.limit_bytes,
            "reserve_bytes": machine.reserve_bytes,
            "weights_bytes": known_weights(),
            "plans": made_plans(),
        }
    except Exception:
        return {"limit_bytes": None, "reserve_bytes": None, "weights_bytes": {}, "plans": {}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _blas() -> dict[str, str | None]:
    in_force = blas_in_force()
    return {"in_force": str(in_force) if in_force else None, "reason": preload_blas().reason}


def _self_test() -> list[dict[str, Any]]:
    try:
        from dflash2_mlx import selftest

        results = selftest.run()
    except Exception as error:
        results = [("start", False, f"{type(error).__name__}: {error}")]
    return [{"name": name, "ok": ok, "detail": detail} for name, ok, detail in results]


def _lines(report: dict[str, Any]) -> list[str]:
    blas = report["blas"]
    rows = {
        "platform": report["platform"],
        "macOS": report["macos"],
        "python": report["python"],
        "chip": _both(report["chip"], report["architecture"]),
        "memory": _gigabytes(report["memory_bytes"]),
        "for the GPU": _gigabytes(report["gpu_memory_bytes"]),
        **{name: version or "not installed" for name, version in report["packages"].items()},
        "BLAS": _both(blas["in_force"] or "MLX's own", blas["reason"]),
        "cache": report["cache"],
    }
    tuning = [f"{'tuning':<17}{known['detail']}" for known in report["tuning"]]
    exactness = [
        f"{'exactness':<17}{known['target']} ({known['dtype']}): {known['detail']}"
        for known in report["exactness"]
    ]
    checks = [
        f"{'ok' if check['ok'] else 'FAILED':<8}{check['name']}: {check['detail']}"
        for check in report["checks"]
    ]
    return [f"{name:<17}{value}" for name, value in rows.items() if value is not None] + [
        *_memory_lines(report["memory"]),
        *exactness,
        *tuning,
        *checks,
    ]


def _memory_lines(memory: dict[str, Any]) -> list[str]:
    limit = memory["limit_bytes"]
    if limit is None:
        return []
    told = [
        f"{_gigabytes(limit)} may be used, {_gigabytes(memory['reserve_bytes'])} are left alone"
    ]
    for name, size in memory["weights_bytes"].items():
        fits = f"leaves {_gigabytes(limit - size)}" if size < limit else "does not fit"
        told.append(f"{name}: weights {_gigabytes(size)}, {fits}")
    told += [f"{name}: {plan['detail']}" for name, plan in memory["plans"].items()]
    return [f"{'memory plan':<17}{line}" for line in told]


def _both(main: str, detail: str | None) -> str:
    return f"{main} ({detail})" if detail else main


def _gigabytes(size: int | None) -> str | None:
    return None if size is None else f"{size / 2**30:.1f} GiB"
