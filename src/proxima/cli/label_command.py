"""`proxima label`: human feedback on a local page."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Literal

from proxima.cli.command import Command
from proxima.core.terminal_text import printable

if TYPE_CHECKING:
    from proxima.pages.label import Item, Store


FROM_RUN = ("model_name", "quantize", "max_new_tokens", "temperature", "top_k", "top_p", "truncate_prompts")


@dataclass
class Label(Command):
    """Let people compare or rate completions on a local web page; export the answers as training data."""

    example: ClassVar[str] = "proxima label --model-name embedded --data my-data/held_out.jsonl --count 8"
    writes: ClassVar[str] = "`feedback.db` (`--db`); with `--export` a .jsonl file for [`reward`](reward.md)."
    guide: ClassVar[str] = "label.md"
    serves: ClassVar[str] = "0"

    db: Path = Path("feedback.db")
    """The answers, in an SQLite file. An existing one is continued; new items are added to it."""
    data: str = ""
    """Prompts to sample completions for, as for `train`."""
    from_run: str = ""
    """Folder of a finished run (`--from` for short), for example runs/NAME: its policy is sampled, with the
    run's model and sampling settings, on the run's own prompts where `--data` gives no others."""
    pairs: str = ""
    """Ready completions instead: a file with `prompt`, `a`, `b` or `prompt`, `chosen`, `rejected`
    (ratings: `completion`)."""
    mode: Literal["pairs", "ratings"] | None = None
    """Compare two completions, or rate one from 1 to 5. By default what the file holds; pairs for a new
    one."""
    instructions: Path | None = None
    """A text file of your own that annotators read before they begin, and whenever they want; kept with the
    answers."""
    controls: str = ""
    """Control questions: a file of pairs with `prompt`, `chosen`, `rejected` (ratings: `completion`,
    `rating`) whose answer is known. Everyone gets them among the others; they measure annotators and are not
    exported."""
    least_sure: str = ""
    """Folder of a reward model: of five times as many samples, or of `--pairs`, keep the `--count` pairs that
    it is least sure about."""
    overlap: float = 0.2
    """Share of the items that every annotator gets, to measure agreement; the rest is shared out, one
    answer each."""

    model_name: str = "Qwen/Qwen3-0.6B-Base"
    """Hugging Face id or local folder of the model to sample from; `embedded` is the one in the package."""
    quantize: Literal["none", "nf4"] = "none"
    """Form of the model's linear layers, as for `train`: `nf4` = 4 bits per weight, for an adapter trained
    so and for `...-bnb-4bit` checkpoints. docs/fourbit.md."""
    adapter: str = ""
    """Folder of a trained policy adapter, for example runs/NAME/policy."""
    adapter_b: str = ""
    """Another adapter, for the second completion: compares two models; `base` = the model without one."""
    count: int = 0
    """Items to sample; prompts are taken again from the first when they run out. 0 = one per prompt."""
    max_new_tokens: int = 64
    """Maximum number of tokens in a completion."""
    temperature: float = 1.0
    """Sampling temperature."""
    top_k: int = 50
    """Sample among the k likeliest tokens; 0 = all."""
    top_p: float = 0.95
    """Of these, among the fewest that hold this share of the probability; 1 = all."""
    truncate_prompts: bool = False
    """Cut prompts that do not fit the model's context on the left, for the model; people see them whole."""
    trust_remote_code: bool = False
    """Run Python code that comes with a checkpoint. Off: such checkpoints are refused."""
    seed: int = 0
    """Seed of sampling and, for a new file, of which side is shown first."""
    device: str = "auto"
    """`auto` = cuda if there is one, else mps, else cpu; or any torch device."""

    host: str = "127.0.0.1"
    """Address to listen on. The default cannot be reached from other machines; over any other the traffic
    is not encrypted."""
    port: int = 0
    """Port to listen on; 0 = a free one."""
    open: bool = False
    """Open the page in the browser."""
    export: Path | None = None
    """Write the answers to this .jsonl file for `proxima reward`, print the agreement, and end."""
    every_answer: bool = False
    """Export one row per answer instead of one per item by majority."""

    def run(self) -> None:
        if self.export is not None:
            return self._export(self.export)
        from proxima.pages.label import Store, make_label_app
        from proxima.pages.web import Site, serve

        if self.from_run:
            self._take_run()
        if not (self.db.exists() or self.data or self.pairs or self.controls):
            raise ValueError(
                f"there is no {self.db} yet; give --data PROMPTS (and --model-name) or --pairs FILE for its "
                "items"
            )
        site = Site(self.host, self.port)
        self._check_least_sure()
        store = Store(self.db, self.mode, self.seed, self.overlap)
        self._instruct(store)
        self._add_items(store)
        items, answers = store.counts()
        if not items:
            raise ValueError(f"{self.db} holds no items; give --data PROMPTS or --pairs FILE")
        print(f"{items} items and {answers} answers in {self.db}")
        serve(make_label_app(store, site), site, self.open)
        print(
            f"{store.counts()[1]} answers in {self.db}; export them with --db {self.db} --export FILE.jsonl"
        )

    def _take_run(self) -> None:
        """The flags that a run stands for."""
        from proxima.evaluator import saved_config
        from proxima.pages.report import read_data
        from proxima.runs import Run

        if self.adapter:
            raise ValueError("--from samples the run's own policy; leave out --adapter, or give --adapter-b")
        config, policy = saved_config(self.from_run), str(Path(self.from_run) / "policy")
        for name in FROM_RUN:
            setattr(self, name, getattr(config, name))
        if config.lora_r:
            self.adapter = policy
        else:
            self.model_name = policy
        noted = read_data(Run(self.from_run))
        self.data = self.data or str(noted.get("data") or "")
        if not self.data:
            raise ValueError(f"{self.from_run} does not name its prompts; give --data PROMPTS")

    def _export(self, path: Path) -> None:
        from proxima.pages.label import Store, export, in_words, summarize

        if self.data or self.pairs or self.from_run:
            raise ValueError("--export writes what --db holds and ends; leave out --data, --pairs and --from")
        if not self.db.exists():
            raise ValueError(f"there is no {self.db} to export from; --db names the file")
        store = Store(self.db, self.mode)
        print(printable("\n".join(in_words(summarize(store)))))
        print(f"{export(store, path, self.every_answer)} rows in {path}")

    def _check_least_sure(self) -> None:
        from proxima.pages.label import Store

        if self.least_sure and "ratings" in (self.mode, self.db.exists() and Store(self.db).mode):
            raise ValueError("--least-sure chooses pairs to compare; leave it out with ratings")
        if self.least_sure and (self.count < 1 or not (self.data or self.pairs)):
            raise ValueError(
                "--least-sure chooses --count pairs among those of --data or --pairs; give both, for example "
                "--data PROMPTS --count 100"
            )

    def _instruct(self, store: Store) -> None:
        from proxima.core.regular_files import read_given
        from proxima.pages.label import read_controls

        if self.instructions is not None:
            try:
                store.instructions = read_given(self.instructions).decode("utf-8-sig")
            except UnicodeDecodeError:
                raise ValueError(f"{self.instructions} is not text in UTF-8 (--instructions)") from None
        if self.controls:
            added = store.add_controls(*read_controls(self.controls, store.mode))
            print(f"{self.controls}: {added} control questions added")

    def _add_items(self, store: Store) -> None:
        from proxima.pages.label import keep_least_sure, load_trained_reward, read_items

        for path, items in ((self.pairs, read_items), (self.data, self._sample)):
            if path:
                found = items(path, store.mode)
                if self.least_sure:
                    reward = load_trained_reward(self.least_sure, self.device, self.trust_remote_code)
                    pool, found = len(found), keep_least_sure(found, reward, self.count)
                    print(f"{len(found)} of {pool} pairs kept: {self.least_sure} is least sure about them")
                added = store.add_items(found)
                print(f"{path}: {added} items added, {len(found) - added} were there already")

    def _sample(self, path: str, mode: str) -> list[Item]:
        from proxima.base_setup import load_tokenizer
        from proxima.config import PPOConfig
        from proxima.data import open_rows, read_prompts
        from proxima.pages.label import POOL, sample_items

        if self.count < 0:
            raise ValueError(f"count ({self.count}) must be 0 (one item per prompt) or more")
        config = PPOConfig(
            model_name=self.model_name,
            quantize=self.quantize,
            max_new_tokens=self.max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            truncate_prompts=self.truncate_prompts,
            trust_remote_code=self.trust_remote_code,
            seed=self.seed,
            device=self.device,
        )
        prompts = read_prompts(open_rows(path), load_tokenizer(self.model_name, self.trust_remote_code))
        count = self.count * POOL if self.least_sure else self.count or len(prompts)
        wanted = [prompts[i % len(prompts)] for i in range(count)]
        adapter_b = {"": None, "base": ""}.get(self.adapter_b, self.adapter_b)
        print(f"sampling {len(wanted)} {mode} from {self.adapter or self.model_name}", flush=True)
        items = sample_items(wanted, config, mode, self.adapter, adapter_b)
        if len(items) < len(wanted):
            print(f"{len(wanted) - len(items)} prompts left out: both completions stayed the same")
        return items
