"""The results as text. In: what was timed. Out: one table per case."""

from __future__ import annotations

from proxima.core.json_record import Record
from proxima.tools.bench.generation_peers import generation_peer_line

ROWS = ("generate", "score", "reward", "value", "update")


def table(result: Record, peer: Record | None = None) -> str:
    """Seconds of each phase next to its floor, then the other counts, then the peer."""
    lines = [
        f"{result['name']}: {_size(result)}, batch {_batch(result)}, prompts {_range(result['prompt'])}, "
        f"responses {_range(result['response'])}, {result['epochs']} epochs, {result['minibatches']} "
        f"optimiser steps each{', checkpointing' if result['checkpointing'] else ''}",
        f"  {'':16}{'seconds':>9}{'floor':>9}{'ratio':>7}",
    ]
    floor = result["floor"]
    for name in ROWS:
        seconds = result["phases"][name]
        ratio = f"{seconds / floor[name]:>7.1f}" if floor[name] else ""
        lines.append(f"  {name:16}{seconds:>9.3f}{floor[name]:>9.3f}{ratio}")
    lines.append(
        f"  {'whole step':16}{result['seconds']:>9.3f}{floor['step']:>9.3f}{result['ratio_to_floor']:>7.1f}"
    )
    lines.append(f"  {'decode step':16}{result['decode_step']:>9.4f}{floor['decode_step']:>9.4f}")
    lines.append(
        f"  {result['tokens_per_second']:,.0f} response tokens per second; warm-up {result['warm_up']:.0f} "
        f"s{_memory(result)}"
    )
    lines.append(
        f"  decode steps after warm-up: {result['graph_replays']} by CUDA graph, "
        f"{result['eager_decode_steps']} without; {result['waiting_slots']:.0%} of their slots waited; "
        f"largest |ratio - 1| of the first minibatch {result['first_ratio_error']:.1g}"
    )
    if peer and "peer" in peer:
        lines.append(generation_peer_line(result, peer))
    elif peer:
        more = _what_differs(result)
        lines.append(_peer_line(result, peer, f"generate {peer['generate']:.2f} s") + more)
    return "\n".join(lines)


def finetuning_table(result: Record, peer: Record | None = None) -> str:
    """Seconds of an optimiser step next to its floor, then memory and the peer."""
    lines = [
        f"{result['name']}: {result['size']}, batch {result['batch']}, prompts {result['prompt']}, answers "
        f"{result['response']}",
        f"  {'':16}{'seconds':>9}{'floor':>9}{'ratio':>7}",
        f"  {'optimiser step':16}{result['seconds']:>9.3f}{result['floor']:>9.3f}"
        f"{result['ratio_to_floor']:>7.1f}",
        f"  {result['tokens_per_second']:,.0f} tokens per second; warm-up {result['warm_up']:.0f} s"
        f"{_memory(result)}",
    ]
    return "\n".join([*lines, *([_peer_line(result, peer)] if peer else [])])


def _what_differs(result: Record) -> str:
    """Between a step of TRL's PPO and one of Proxima's."""
    said = " It trains its value model in full, Proxima with LoRA." if result["generations"] == 1 else ""
    is_truncated = result["top_k"] > 0 or result["top_p"] < 1
    return said + (" It samples from all tokens." if is_truncated and result["generations"] == 1 else "")


def _memory(result: Record) -> str:
    if result["held_gib"] is None:
        return ""
    return f"; GPU memory {result['held_gib']:.1f} GiB (allocated {result['peak_gib']:.1f})"


def _peer_line(result: Record, peer: Record, *facts: str) -> str:
    memory = [f"allocated {peer['peak_gib']:.1f} GiB"] if peer["peak_gib"] else []
    shown = ", ".join([*facts, *memory])
    return (
        f"  TRL {peer['version']}: {peer['seconds']:.2f} s per step{f' ({shown})' if shown else ''}: "
        f"{peer['seconds'] / result['seconds']:.1f} times as long."
    )


def _size(result: Record) -> str:
    """`8B`, or `8B in nf4`."""
    return result["size"] + (f" in {result['quantize']}" if result["quantize"] != "none" else "")


def _batch(result: Record) -> str:
    """`64`, or `8 x 8` where prompts have several responses."""
    return str(result["batch"]) + (f" x {result['generations']}" if result["generations"] > 1 else "")


def _range(bounds: tuple[int, int]) -> str:
    """`64-512`, or `512` where both are the same."""
    return "-".join(map(str, dict.fromkeys(bounds)))
