"""Figures of a base in 4 bits on one GPU, with random weights in the shape of an 8B model.

    python -m tests.gpu.fourbit_figures                          # all: about three minutes on an H200
    python -m tests.gpu.fourbit_figures --only kernels compare   # some, of `PARTS`; `tilings` only where named
    python -m tests.gpu.fourbit_figures --folder large           # keeps the checkpoints (18 GiB) for the next call
    python -m tests.gpu.fourbit_figures --tiny                   # the same code on any machine; no figure counts

Each figure is a line of JSON as soon as it is known, with its bound; with $OUT set also in `fourbit.jsonl`
there. A part that fails prints its error, and the next one begins. Parts come in the order of what a cut would
lose.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import shutil
import sys
import tempfile
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from statistics import median

import torch

from proxima.base_setup import load_config
from proxima.config import PPOConfig
from proxima.core.json_record import Record
from proxima.core.linear4bit import Linear4bit
from proxima.core.nf4 import dequantize, quantize
from proxima.core.sampling import Sampling
from proxima.ppo_trainer import PPOTrainer
from proxima.runtime.engine.decode_clock import StepTimer
from proxima.runtime.engine.quantized_weights import QuantizedWeight, Scratch, join
from proxima.tools.bench import SHAPES, Case, make_random_model
from proxima.tools.bench.bench_case import eos_ids, make_prompts
from proxima.tools.doctor.memory_estimate import estimate_memory
from tests.helpers import Crash, crash_at, difference, shake, weights

GIB = 2**30
LAYER = {  # an 8B model's projections: outputs of the modules, inputs, padding of adapters of rank 16
    "qkv": ((4096, 1024, 1024), 4096, 48),
    "out": ((4096,), 4096, 16),
    "up": ((12288, 12288), 4096, 32),
    "down": ((4096,), 12288, 16),
}
SMALL_LAYER = {
    "qkv": ((128, 64, 64), 128, 24),
    "out": ((128,), 128, 8),
    "up": ((256, 256), 128, 16),
    "down": ((128,), 256, 8),
}
ROWS = {8: 1.0, 16: 1.0, 32: 1.0, 64: 1.2}
"""Sequences decoded at once, and the most time that a step may take, as a share of bfloat16's."""
FOUR_LAYERS = "8B, 4 layers"
"""The same widths, for what needs several runs."""


@dataclass
class Session:
    """What all parts share."""

    home: Path
    tiny: bool
    started: float
    shapes: dict[str, str]

    @property
    def on_gpu(self) -> bool:
        return torch.cuda.is_available()

    @property
    def device(self) -> str:
        return "cuda" if self.on_gpu else "cpu"

    def report(self, figure: str, value: object, bound: str = "", **more: object) -> None:
        line = json.dumps(
            {"figure": figure, "value": _short(value), "bound": bound}
            | {name: _short(one) for name, one in more.items()}
            | {"at": round(time.perf_counter() - self.started, 1)}
        )
        print(line, flush=True)
        if out := os.environ.get("OUT"):
            with (Path(out) / "fourbit.jsonl").open("a", encoding="utf-8") as file:
                file.write(line + "\n")

    def model(self, size: str) -> str:
        """The folder of a checkpoint with random weights, made at its first use."""
        folder = self.home / size.replace(", ", "-").replace(" ", "-")
        if not (folder / "config.json").is_file():
            begun = time.perf_counter()
            make_random_model(folder, self.shapes[size], self.device)
            self.free()
            self.report(f"seconds to write {size}", time.perf_counter() - begun)
        return str(folder)

    def case(self, batch: int, prompt: int, response: int, **more: object) -> Case:
        """Of full size, or of a few tokens."""
        if self.tiny:
            batch, prompt, response = min(batch, 4), min(prompt, 12), min(response, 8)
        given: Record = {"prompt": (prompt, prompt), "response": (response, response), "epochs": 1, **more}
        return Case("figures", self.shapes["8B"], batch, **given)

    def trainer(self, size: str, case: Case, preset: str = "", **settings: object) -> PPOTrainer:
        """Nothing ends a response before its limit."""
        given = (
            case.settings | {"model_name": self.model(size), "run_dir": str(self.home / "runs")} | settings
        )
        trainer = PPOTrainer(PPOConfig.from_preset(preset, **given) if preset else PPOConfig(**given))
        trainer.models.eos_ids = ()
        return trainer

    def free(self) -> None:
        gc.collect()
        if self.on_gpu:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def allocated(self) -> float:
        """GiB that tensors take now."""
        return torch.cuda.memory_allocated() / GIB if self.on_gpu else 0.0

    def peaks(self) -> tuple[float, float, float]:
        """GiB at the peak since `free`: allocated, held by torch, and of the whole device."""
        if not self.on_gpu:
            return 0.0, 0.0, 0.0
        held = torch.cuda.max_memory_reserved() / GIB
        free, total = torch.cuda.mem_get_info()
        beside = (total - free - torch.cuda.memory_reserved()) / GIB  # the context and the libraries
        return torch.cuda.max_memory_allocated() / GIB, held, held + beside

    @contextmanager
    def cap(self, gib: float) -> Iterator[None]:
        """Torch's allocator may hold no more inside the block."""
        self.free()
        if not self.on_gpu:
            yield
            return
        torch.cuda.set_per_process_memory_fraction(
            gib * GIB / torch.cuda.get_device_properties(0).total_memory
        )
        try:
            yield
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)


def _short(value: object) -> object:
    return float(f"{value:.4g}") if isinstance(value, float) else value


# --- kernels ---


def projection(name: str, nested: bool = True, layer: Record = LAYER) -> tuple[QuantizedWeight, torch.Tensor]:
    """A joined weight, and what it stands for beside its adapter."""
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes, inputs, padding = layer[name]
    scratch = Scratch(torch.empty(0, dtype=torch.bfloat16, device=device))
    parts = [0.02 * torch.randn(size, inputs, device=device).bfloat16() for size in sizes]
    packed = [quantize(part, nested) for part in parts]
    joined = join(packed, padding, scratch)
    joined.up.copy_(0.02 * torch.randn(sum(sizes), padding, device=device))
    return joined, torch.cat([torch.cat([dequantize(part) for part in packed]), joined.up], 1)


def milliseconds(call: Callable[[], object], times: int = 50) -> float:
    """Of one call, on a GPU in a CUDA graph."""
    for _ in range(3):
        call()
    if not torch.cuda.is_available():
        begun = time.perf_counter()
        call()
        return 1000 * (time.perf_counter() - begun)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / times


def product_calls(
    name: str, joined: QuantizedWeight, weight: torch.Tensor, rows: int
) -> tuple[Callable[[], object], ...]:
    """The product of a decode step, from codes and from the weight in full."""
    padded = torch.randn(rows, weight.shape[1], device=weight.device).to(weight.dtype)
    x = padded[:, : joined.inputs].contiguous()
    if weight.device.type == "cpu" and not os.environ.get("TRITON_INTERPRET"):
        return (lambda: padded @ joined.fill().t()), (lambda: padded @ weight.t())
    from proxima.runtime.engine.kernels import few_rows_product, nf4_product

    down = padded.new_zeros(weight.shape[1] - joined.inputs, joined.inputs)
    if name in ("out", "down"):
        return (
            partial(nf4_product, x, joined, None, down),
            partial(few_rows_product, x, weight, None, down),
        )
    return (
        partial(nf4_product, padded, joined, None, gated=name == "up"),
        partial(few_rows_product, padded, weight, None, gated=name == "up"),
    )


def time_kernels(session: Session) -> None:
    """Fill and products of one layer."""
    layer = SMALL_LAYER if session.tiny else LAYER
    made = {name: projection(name, layer=layer) for name in layer}
    equal = all(torch.equal(joined.fill(), wanted) for joined, wanted in made.values())
    session.report("fill gives the bits of dequantising", equal, "true")
    each = {name: milliseconds(joined.fill) for name, (joined, _) in made.items()}
    session.report("fill, ms per layer", sum(each.values()), "<= 0.17", **each)
    for rows in ROWS:
        both = {
            name: [milliseconds(call) for call in product_calls(name, *pair, rows)]
            for name, pair in made.items()
        }
        ours, theirs = (sum(times[i] for times in both.values()) for i in range(2))
        detail = {f"{name} us": [round(1000 * one, 1) for one in times] for name, times in both.items()}
        session.report(f"products of a layer, {rows} rows, nf4 / bfloat16", ours / theirs, "", **detail)


def time_tilings(session: Session) -> None:
    """The products of few rows, cut into programs in other ways: what `nf4_kernels.tiling` might give."""
    from proxima.runtime.engine.kernels import nf4_kernels, run_together

    chosen, own = threading.local(), nf4_kernels.tiling
    nf4_kernels.tiling = lambda *given: getattr(chosen, "tiling", None) or own(*given)

    def cut(call: Callable[[], object], made: nf4_kernels.Tiling | None) -> Callable[[], object]:
        def run() -> object:
            chosen.tiling = made
            return call()

        return run

    layer = SMALL_LAYER if session.tiny else LAYER
    try:
        for name in layer:
            pair = projection(name, layer=layer)
            options = [None, *tilings(nf4_kernels.Tiling, session.tiny, gated=name == "up")]
            for rows in (16, 64):
                call = product_calls(name, *pair, rows)[0]
                calls = {option: cut(call, option) for option in options}
                if session.on_gpu:  # compiles them
                    run_together([partial(_quietly, one) for one in calls.values()], torch.device("cuda"))
                times = {str(option and tuple(option)): _time_or_none(one) for option, one in calls.items()}
                found = {key: 1000 * value for key, value in times.items() if value is not None}
                best = sorted(found.items(), key=itemgetter(1))[:6]
                session.report(
                    f"{name}, {rows} rows, us now", found.get("None"), "", best=best, tried=len(found)
                )
        time_fills(session)
    finally:
        nf4_kernels.tiling = own


def time_splits(session: Session) -> None:
    """The products of few rows in bfloat16 of narrow outputs, as `few_rows_kernels.blocks` has them and with
    the inputs in several parts; microseconds."""
    from proxima.runtime.engine.kernels import few_rows_kernels

    own, device = few_rows_kernels.blocks, session.device
    sizes = {
        "0.6B out": (1024, 2048),
        "0.6B down": (1024, 3072),
        "8B out": (4096, 4096),
        "8B down": (4096, 12288),
    }
    every = [few_rows_kernels.Blocks(*one) for one in product((16, 32), (64, 128, 256), (3, 4), (2, 4, 8))]
    try:
        for name, (outputs, inputs) in sizes.items():
            weight, down = (
                torch.randn(size, inputs + more, device=device).bfloat16()
                for size, more in ((outputs, 16), (16, 0))
            )
            for rows in (8, 64):
                x, found = torch.randn(rows, inputs, device=device).bfloat16(), {}
                call = partial(few_rows_kernels.few_rows_product, x, weight, None, down)
                few_rows_kernels.blocks = own
                now = _time_or_none(call)
                for option in every[:1] if session.tiny else every:
                    few_rows_kernels.blocks = lambda *shape, option=option: option
                    if (taken := _time_or_none(call)) is not None:
                        found[str(tuple(option))] = 1000 * taken
                best = sorted(found.items(), key=itemgetter(1))[:5]
                session.report(
                    f"{name}, {rows} rows, us now", 1000 * (now or 0), "", best=best, tried=len(found)
                )
    finally:
        few_rows_kernels.blocks = own


def time_fills(session: Session) -> None:
    """`fill` of the widest projection, with other numbers of rows and blocks per program."""
    from proxima.runtime.engine.kernels import nf4_kernels

    joined, _ = projection("up", layer=SMALL_LAYER if session.tiny else LAYER)
    own, found = (nf4_kernels.FILL_ROWS, nf4_kernels.FILL_BLOCKS), {}
    try:
        for sizes in [own, *product((1, 2, 4, 8), (8, 16, 32))]:
            nf4_kernels.FILL_ROWS, nf4_kernels.FILL_BLOCKS = sizes
            found[str(sizes)] = _time_or_none(joined.fill)
    finally:
        nf4_kernels.FILL_ROWS, nf4_kernels.FILL_BLOCKS = own
    best = sorted((taken, sizes) for sizes, taken in found.items() if taken is not None)
    session.report("fill of up, ms now", found[str(own)], "", best=best[:6])


def tilings(make: Callable[..., tuple[int, ...]], tiny: bool, gated: bool) -> list[tuple[int, ...]]:
    """Outputs per program, blocks, splits, warps and stages to try."""
    splits = (1,) if gated else (4, 8)
    every = [make(*sizes) for sizes in product((32, 64), (1, 2, 4), splits)]
    every += [make(64, 2, split, *more) for split in splits for more in ((4, 2), (4, 4), (8, 3), (8, 2))]
    every += [make(64, 4, split, 4, stages, True) for split in splits for stages in (2, 3)]
    every += [make(64, 4, split, 8, 2, True) for split in splits]
    return every[:2] if tiny else every


def _quietly(call: Callable[[], object]) -> None:
    with suppress(Exception):  # too much shared memory, for one
        call()


def _time_or_none(call: Callable[[], object]) -> float | None:
    try:
        return milliseconds(call, 20)
    except Exception:
        return None


# --- memory ---


@contextmanager
def host_memory() -> Iterator[list[float]]:
    """Private memory of this process above what it is now: the highest so far, in GiB, while the block runs."""
    before, found, done = private_memory(), [0.0], threading.Event()

    def watch() -> None:
        while not done.wait(0.01):
            found[0] = max(found[0], private_memory() - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield found
    finally:
        done.set()
        thread.join()


def private_memory() -> float:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 2**20


def fit(session: Session, cap: float, name: str, preset: str = "", **settings: object) -> None:
    """Three whole steps of 16 x (512 + 512) under a cap of the allocator; and what loading took."""
    case = session.case(16, 512, 512, quantize="nf4")
    session.model("8B")
    with session.cap(cap), host_memory() as host:
        before_it = session.allocated()  # of earlier parts
        begun = time.perf_counter()
        trainer = session.trainer("8B", case, preset, **settings)
        assert trainer.models.policy.backbone.decoder is not None  # joins the weights
        loaded = session.allocated()
        session.report("seconds to load in 4 bits", time.perf_counter() - begun)
        session.report(
            "GPU peak of loading above what stays, GiB", session.peaks()[0] - loaded, "<= 0.5", stays=loaded
        )
        session.report("private host memory of loading, GiB", host[0], "<= 3", in_all=private_memory())
        before = trainer.models.micro_batches.tokens
        for step in range(3):
            results = trainer.ppo_step(make_prompts(case, step))
            allocated, held, device = session.peaks()
            session.report(
                f"{name}, step {step + 1}: GiB held",
                held,
                f"<= {cap}",
                allocated=allocated,
                device=device,
                micro_batch_tokens=[before, trainer.models.micro_batches.tokens],
                first_ratio_error=results["first_ratio_error"],
                sampling_gap=results["sampling_gap"],
                response_tokens=results["tokens"],
                seconds={key: round(value, 2) for key, value in results.items() if key.startswith("seconds")},
            )
    estimate = estimate_memory(
        trainer.config, load_config(trainer.config.model_name), case.prompt[1], session.on_gpu
    )
    session.report(
        f"{name}: doctor's estimate / held on the device",
        estimate.total / GIB / max(device - before_it, 1e-9),
        "0.95 to 1.25",
        of_earlier_parts=before_it,
        **{part: amount / GIB for part, amount in vars(estimate).items()},
        total=estimate.total / GIB,
        per_torch=(estimate.total - estimate.overhead) / GIB / max(held - before_it, 1e-9),
    )


def fit_22(session: Session) -> None:
    fit(session, 22, "22 GiB", gradient_checkpointing=True, micro_batch_tokens=4096)


def fit_14(session: Session) -> None:
    fit(session, 14, "16gb preset, 14 GiB", preset="16gb")


# --- beside bfloat16 ---


def compare(session: Session) -> None:
    """Sampling gap, update and decode step, beside a bfloat16 base that holds the dequantised weights."""
    case = session.case(16, 192, 64, epochs=2)  # 4,096 tokens in one pass
    ours, theirs = (
        session.trainer("8B", replace(case, quantize=form), micro_batch_tokens=8192)
        for form in ("nf4", "none")
    )
    copy_weights(ours, theirs)
    found = {"nf4": run_steps(session, case, ours), "bfloat16": run_steps(session, case, theirs)}
    gaps, updates, errors = ({name: one[i] for name, one in found.items()} for i in range(3))
    session.report("sampling gap, nf4 / bfloat16", _ratio(gaps), "<= 1.25", **gaps)
    session.report("update of 4,096 tokens, nf4 / bfloat16", _ratio(updates), "<= 1.12", **updates)
    session.report("first ratio error without checkpointing", errors["nf4"], "0", bfloat16=errors["bfloat16"])
    for rows, bound in sorted(ROWS.items(), reverse=True):  # so that the slots suffice from the first on
        times = {"nf4": decode_step(session, ours, rows), "bfloat16": decode_step(session, theirs, rows)}
        session.report(f"decode step at {rows}, nf4 / bfloat16", _ratio(times), f"<= {bound}", **times)


def _ratio(found: dict[str, float]) -> float:
    return found["nf4"] / max(found["bfloat16"], 1e-12)


def copy_weights(source: PPOTrainer, target: PPOTrainer) -> None:
    """Overwrite a base in full by what another's codes stand for."""
    networks = (source.models.policy.backbone.network, target.models.policy.backbone.network)
    for name, layer in networks[0].named_modules():
        if isinstance(layer, Linear4bit):
            networks[1].get_submodule(name).weight.data.copy_(dequantize(layer.nf4))


def run_steps(session: Session, case: Case, trainer: PPOTrainer) -> tuple[float, float, float]:
    """The first step's sampling gap, seconds of an update, the largest first ratio error."""
    shake(trainer, 0.01)
    results = [trainer.ppo_step(make_prompts(case, step)) for step in range(2 if session.tiny else 5)]
    update = median(result["seconds/update"] for result in results[2:] or results) / case.epochs
    return results[0]["sampling_gap"], update, max(result["first_ratio_error"] for result in results)


def decode_step(session: Session, trainer: PPOTrainer, rows: int) -> float:
    """Milliseconds of a decode step of this many sequences, 512 tokens into them."""
    case = replace(session.case(rows, 512, 65), batch=rows)
    engine = trainer.models.policy.backbone.generation
    assert engine is not None
    prompts = trainer.generator.read_prompts(make_prompts(case, 0))
    engine.clock = StepTimer(engine.on_gpu)
    trainer.models.policy.generate(prompts, Sampling(case.response[1], 1.0, 0, 1.0, (), 0, 0))
    return 1000 * engine.clock.seconds()


# --- bits ---


def bits(session: Session) -> None:
    """With and without checkpointing and a second time; killed and resumed."""
    found, errors = [], []
    case = session.case(8, 128, 32, quantize="nf4")
    for on in (False, True, False):
        trainer = shake(session.trainer(FOUR_LAYERS, case, gradient_checkpointing=on), 0.02)
        errors.append(
            max(trainer.ppo_step(make_prompts(case, step))["first_ratio_error"] for step in range(2))
        )
        found.append(weights(trainer))
        del trainer
        session.free()
    session.report("first ratio errors: without, with checkpointing, again", errors, "0")
    session.report("weights with checkpointing - without", difference(found[0], found[1]), "0")
    session.report("weights of a second run - first", difference(found[0], found[2]), "0")
    ragged(session)
    resume(session)


def ragged(session: Session) -> None:
    """Sequences of many lengths in little memory: the last chunk of logits is seldom full."""
    case = session.case(16, 128, 32, quantize="nf4", minibatches=2)
    case = replace(case, prompt=(case.prompt[1] // 2, case.prompt[1]), response=(1, case.response[1]))
    trainer = shake(session.trainer(FOUR_LAYERS, case, micro_batch_tokens=1000), 0.02)
    trainer.models.eos_ids = eos_ids(case)
    results = [trainer.ppo_step(make_prompts(case, step)) for step in range(2)]
    errors, counts = ([result[name] for result in results] for name in ("first_ratio_error", "tokens"))
    chunk = trainer.models.micro_batches.chunk
    session.report("first ratio errors, ragged", max(errors), "0", response_tokens=counts, chunk=chunk)


def resume(session: Session) -> None:
    """A run that dies in its third step and is resumed, against one that does not."""
    case = session.case(4, 128, 16, quantize="nf4")
    prompts = [prompt for step in range(4) for prompt in make_prompts(case, step)]

    def trainer(name: str) -> PPOTrainer:
        settings = {
            "gradient_checkpointing": True,
            "checkpoint_every": 1,
            "run_name": name,
            "run_dir": folder,
        }
        return session.trainer(FOUR_LAYERS, case, **settings)

    folder = tempfile.mkdtemp(dir=session.home)
    whole = trainer("whole")
    whole.train(prompts, 1)
    wanted = weights(whole)
    del whole
    session.free()
    with suppress(Crash):
        crash_at(trainer("died"), 3).train(prompts, 1)
    session.free()
    again = trainer("died")
    again.train(prompts, 1, resume=True)
    session.report("weights of a resumed run - one in a piece", difference(wanted, weights(again)), "0")


PARTS = {
    "kernels": time_kernels,
    "fit_22": fit_22,
    "compare": compare,
    "bits": bits,
    "fit_14": fit_14,
    "tilings": time_tilings,
    "splits": time_splits,
}
USUAL = [name for name in PARTS if name not in ("tilings", "splits")]  # those two search, and only when asked


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--only", nargs="+", choices=PARTS, default=USUAL)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message="no reward is configured")
    SHAPES[FOUR_LAYERS] = SHAPES["8B"] | {"num_hidden_layers": 4}
    shapes = {name: "tiny" if given.tiny else name for name in ("8B", FOUR_LAYERS)}
    memory = Path("/dev/shm")  # files there are read fastest
    roomy = memory.is_dir() and shutil.disk_usage(memory).free > 24 * GIB
    with tempfile.TemporaryDirectory(dir=memory if roomy else None) as temporary:
        home = given.folder or Path(temporary)
        home.mkdir(parents=True, exist_ok=True)
        session = Session(home, given.tiny, time.perf_counter(), shapes)
        return sum(run_part(session, name) for name in given.only)


def run_part(session: Session, name: str) -> int:
    """0, or 1 where it failed, which is printed."""
    begun = time.perf_counter()
    try:
        PARTS[name](session)
    except Exception as error:  # the next part may be all right
        session.report(f"{name} failed", f"{type(error).__name__}: {error}"[:400])
        traceback.print_exc()
        return 1
    finally:
        session.report(f"seconds of {name}", time.perf_counter() - begun)
        session.free()
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
