"""Small files in the layouts of other tools, as these write them; one writer a format.

Those of W&B and MLflow come from the tools themselves, in the tests that have them.
"""

from __future__ import annotations

import json
import math
import sqlite3
import sys
import zlib
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
from agent.helpers.import_score_files import BEGIN, write_lighteval, write_lm_eval, write_opencompass
from pyarrow import parquet


def write_csv(folder: Path, rows: int = 20, metrics: int = 0) -> Path:
    path = folder / "log.csv"
    more = "".join(f",{name}" for name in _more(0, metrics))
    lines = []
    for step in range(rows):
        cells = [
            step,
            BEGIN + step,
            3 / (step + 1),
            "" if step % 2 else 1e-3,
            "gpt",
            *_more(step, metrics).values(),
        ]
        lines.append(",".join(map(str, cells)) + "\n")
    path.write_text(f"step,time,loss,lr,model{more}\n" + "".join(lines))
    return path


def write_jsonl(folder: Path, rows: int = 20, metrics: int = 0) -> Path:
    path = folder / "log.jsonl"
    rows_of = (
        {"step": step, "loss": 3 / (step + 1), "eval": {"acc": step / rows}, **_more(step, metrics)}
        for step in range(rows)
    )
    path.write_text("".join(json.dumps(row) + "\n" for row in rows_of))
    return path


def write_parquet(folder: Path, rows: int = 20) -> Path:
    path = folder / "log.parquet"
    columns = {
        "step": pa.array(range(rows)),
        "loss": pa.array([3 / (step + 1) for step in range(rows)]),
        "lr": pa.array([None if step % 2 else 1e-3 for step in range(rows)]),
        "model": pa.array(["gpt"] * rows),
    }
    parquet.write_table(pa.table(columns), path)
    return path


def _more(step: int, metrics: int) -> dict[str, float]:
    """Further metrics of a row."""
    return {f"m{i}": (step + 1) / (i + 3) for i in range(metrics)}


def write_wandb(folder: Path, rows: int = 20, metrics: int = 0) -> Path:
    """An offline run in the records that W&B's library writes; see tests/agent/importing/test_wandb.py."""
    path = folder / "run-abcd1234.wandb"
    run = {1: b"abcd1234", 2: b"team", 3: b"project", 4: _items(2, {"lr": 1e-3, "seed": 7}, 1), 8: b"gpt fp8"}
    records = [message({17: message(run)})]
    for step in range(rows):
        values = {"train/loss": 3 / (step + 1), "lr": 1e-3, "_timestamp": BEGIN + step, "_step": step}
        values |= _more(step, metrics)
        records.append(message({2: _items(1, values, 1) + message({2: message({1: step})})}))
    picture = write_content(folder / "files" / "media" / "images" / "a.png", PNG)
    table = write_content(folder / "files" / "media" / "table" / "a.table.json", TABLE)
    logged = {
        "picture": {"_type": "image-file", "path": picture, "caption": "c", "width": 1},
        # Newer versions write each entry as an item of its own.
        "table._type": "table-file",
        "table.path": table,
        "table.nrows": 1,
        "several": {"_type": "images/separated", "filenames": [picture, "../../secret"], "captions": ["x"]},
        "_step": 5,
    }
    records.append(message({2: _items(1, logged, 1) + message({2: message({1: 5})})}))
    records.append(message({18: message({1: 0})}))
    path.write_bytes(b":W&B\xe1\xbe\x00" + leveldb(records, 7))
    return path


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
TABLE = json.dumps({"columns": ["prompt", "score"], "data": [["a", 0.5], ["b", None]]}).encode()


def write_content(path: Path, content: bytes) -> str:
    """Write a file of a media; returns its path as tools have it: below the folder of its kind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path.relative_to(path.parents[2]).as_posix()


def _items(number: int, values: Mapping[str, Any], field: int) -> bytes:
    """Items as fields of a message: their key is nested in newer versions (2)."""
    parts = [message({number: key.encode(), 16: json.dumps(value).encode()}) for key, value in values.items()]
    return b"".join(_field(field, part) for part in parts)


def message(fields: Mapping[int, int | bytes]) -> bytes:
    """A message of protocol buffers."""
    return b"".join(_field(number, value) for number, value in fields.items())


def _field(number: int, value: int | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    parts = []
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


def leveldb(records: list[bytes], offset: int) -> bytes:
    """The records as a log of LevelDB, whose first block begins after `offset` bytes."""
    log = bytearray()
    for record in records:
        begin = True
        while begin or record:
            room = 32_768 - (offset + len(log)) % 32_768
            if room < 7:
                log += bytes(room)
                continue
            part, record = record[: room - 7], record[room - 7 :]
            kind = (1 if begin else 4) if not record else (2 if begin else 3)
            checksum = zlib.crc32(bytes([kind]) + part)
            log += checksum.to_bytes(4, "little") + len(part).to_bytes(2, "little") + bytes([kind]) + part
            begin = False
    return bytes(log)


def write_mlflow_files(folder: Path, rows: int = 20) -> Path:
    """A run of the file store."""
    run = folder / "mlruns" / "1" / "0123456789abcdef0123456789abcdef"
    (run / "metrics" / "train").mkdir(parents=True)
    (run / "params").mkdir()
    (run / "tags").mkdir()
    (run.parent / "meta.yaml").write_text("experiment_id: '1'\nname: exp\n")
    begin = int(BEGIN * 1e3)
    meta = f"run_id: {run.name}\nrun_name: gpt\nstart_time: {begin}\nend_time: {begin + 60_000}\nstatus: 3\n"
    (run / "meta.yaml").write_text(meta)
    (run / "params" / "lr").write_text("0.001")
    (run / "tags" / "mlflow.runName").write_text("gpt bf16")
    lines = [f"{begin + step} {3 / (step + 1)!r} {step}\n" for step in range(rows)]
    (run / "metrics" / "train" / "loss").write_text("".join(lines))
    listed = [{"path": "tables/a.json", "type": "table"}]
    (run / "tags" / "mlflow.loggedArtifacts").write_text(json.dumps(listed))
    stem = f"by~step+step+7+timestamp+{begin}+0a1b"
    for name, content in (
        (f"images/{stem}.png", PNG),
        (f"images/{stem}+compressed.webp", PNG),
        ("tables/a.json", TABLE),
        ("samples/a.txt", b"Once upon a time"),
        ("model/weights.bin", b"\0"),
    ):
        write_content(run / "artifacts" / name, content)
    return run


def write_mlflow_sqlite(folder: Path, rows: int = 20) -> Path:
    """The tables of MLflow's database that the reader reads, with two runs of which one is deleted."""
    path = folder / "mlflow.db"
    with sqlite3.connect(path) as database:
        database.executescript("""
            CREATE TABLE experiments (experiment_id INTEGER, name TEXT);
            CREATE TABLE runs (run_uuid TEXT, name TEXT, status TEXT, start_time BIGINT, end_time BIGINT,
                lifecycle_stage TEXT, experiment_id INTEGER);
            CREATE TABLE metrics (key TEXT, value FLOAT, timestamp BIGINT, step BIGINT, is_nan BOOLEAN,
                run_uuid TEXT);
            CREATE TABLE params (key TEXT, value TEXT, run_uuid TEXT);
            CREATE TABLE tags (key TEXT, value TEXT, run_uuid TEXT);
            INSERT INTO experiments VALUES (1, 'exp');
        """)
        begin = int(BEGIN * 1e3)
        for identity, stage in (("a" * 32, "active"), ("b" * 32, "deleted")):
            run = (identity, begin, begin, stage)
            database.execute("INSERT INTO runs VALUES (?, 'gpt', 'FINISHED', ?, ?, ?, 1)", run)
            database.execute("INSERT INTO params VALUES ('lr', '0.001', ?)", (identity,))
            rows_of = [
                ("loss", 3 / (step + 1), begin + step, step, step == 5, identity) for step in range(rows)
            ]
            database.executemany("INSERT INTO metrics VALUES (?, ?, ?, ?, ?, ?)", rows_of)
    database.close()
    return path


def write_trackio(folder: Path, rows: int = 20, metrics: int = 0) -> Path:
    """A project with two runs, which have the same media at step 5."""
    path = folder / "project.db"
    write_content(folder / "media" / "project" / "a.png", PNG)
    media = {
        "picture": {"_type": "trackio.image", "file_path": "project/a.png", "caption": "c"},
        "secret": {"_type": "trackio.video", "file_path": "../project.db", "caption": None},
        "sample": {"_type": "trackio.markdown", "_value": "Once upon a time"},
        "table": {"_type": "trackio.table", "_value": [{"prompt": "a", "score": 0.5}, {"prompt": "b"}]},
        "histogram": {"_type": "trackio.histogram", "bins": [0.0, 1.0], "values": [1]},
    }
    with sqlite3.connect(path) as database:
        database.executescript("""
            CREATE TABLE metrics (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL,
                timestamp TEXT NOT NULL, run_name TEXT NOT NULL, step INTEGER NOT NULL,
                metrics TEXT NOT NULL);
            CREATE TABLE configs (id INTEGER PRIMARY KEY AUTOINCREMENT, run_id TEXT NOT NULL,
                run_name TEXT NOT NULL, config TEXT NOT NULL, created_at TEXT NOT NULL, UNIQUE(run_id));
        """)
        for name in ("bf16", "fp8"):
            config = json.dumps({"lr": 1e-3, "seed": 2, "_Group": "g", "_Created": _iso(0)})
            database.execute(
                "INSERT INTO configs VALUES (NULL, ?, ?, ?, ?)", (f"id-{name}", name, config, _iso(0))
            )
            for step in range(rows):
                logged = media if step == 5 else {}
                values = json.dumps(
                    {"loss": 3 / (step + 1), "bad": "Infinity", "text": "x", **_more(step, metrics), **logged}
                )
                row = (f"id-{name}", _iso(step), name, step, values)
                database.execute("INSERT INTO metrics VALUES (NULL, ?, ?, ?, ?, ?)", row)
    database.close()
    return path


def write_inspect_log(folder: Path, steps: int = 10, rank: int = 0) -> Path:
    """A statistics log of Transformer Engine."""
    below = folder / "nvdlfw_inspect_statistics_logs"
    below.mkdir(exist_ok=True)
    path = below / f"nvdlfw_inspect_globalrank-{rank}.log"
    lines = []
    for step in range(steps):
        for module in ("decoder.0.qkv", "decoder.0.fc1"):
            for tensor in ("activation", "weight", "gradient"):
                for stat, value in (("cur_amax", 2.0 + step), ("underflows%", 1.25), ("scale_inv_max", 0.25)):
                    lines.append(_inspect_line(f"{module}_{tensor}_{stat}", step, value))
        lines.append(_inspect_line("grad_norm_total", step, 1.5))
    path.write_text("".join(lines))
    return path


def _inspect_line(name: str, step: int, value: float) -> str:
    begin = f"2026-01-02 03:04:05,{step % 1000:03d} - INFO - {name}"
    return f"{begin} \t\t\t\t iteration={step:06d} \t\t\t\t value={value:.4f}\n"


def write_megatron(folder: Path, rows: int = 20) -> Path:
    """A log with the arguments, an evaluation, and a second start from step 110."""
    path = folder / "train.log"
    lines = [
        "[default0]:------------------------ arguments ------------------------",
        "[default0]:  bf16 ............................................ True",
        "[default0]:  fp8 ............................................. hybrid",
        "[default0]:  seed ............................................ 1234",
        "[default0]:  seq_length ...................................... 4096",
        "[default0]:-------------------- end of arguments ---------------------",
        "    forward-backward ...............................: (1111.11, 1112.12)",
        *(_megatron_line(10 * (step + 1), 9 / (step + 1)) for step in range(rows)),
        f" validation loss at iteration {10 * rows} | lm loss value: 2.5E+00 | lm loss PPL: 1.2E+01 | ",
        *(_megatron_line(10 * (step + 1), 9 / (step + 1)) for step in range(rows // 2, rows)),
    ]
    path.write_text("\n".join(lines) + "\n")
    return path


def _megatron_line(step: int, loss: float) -> str:
    return (
        f" [2026-01-02 03:04:05] iteration {step:8d}/  500000 | consumed samples: {256 * step:12d} | "
        f"elapsed time per iteration (ms): 1200.0 | learning rate: 1.5E-06 | global batch size:   256 | "
        f"lm loss: {loss:.6E} | loss scale: 1.0 | grad norm: 2.000 | number of skipped iterations:   0 |"
    )


def write_neptune(folder: Path, rows: int = 20) -> Path:
    """A run of neptune-exporter's export, in two files; returns the first."""
    base = {"project_id": "team/project", "run_id": "RUN-1"}
    kinds: list[tuple[str, str, str, Any]] = [
        ("sys/name", "string", "string_value", "gpt"),
        ("sys/custom_run_id", "string", "string_value", "gpt-1"),
        ("sys/tags", "string_set", "string_set_value", ["a"]),
        ("sys/failed", "bool", "bool_value", False),
        ("sys/creation_time", "datetime", "datetime_value", datetime.fromtimestamp(BEGIN, UTC)),
        ("params/lr", "float", "float_value", 1e-3),
        ("params/layers", "int", "int_value", 12),
        ("params/of_another_run", "int", "int_value", None),
        ("model", "file", "file_value", {"path": "model.pt"}),
    ]
    values: list[dict[str, Any]] = [
        {**base, "attribute_path": path, "attribute_type": kind, column: value}
        for path, kind, column, value in kinds
    ]
    values += [
        {
            **base,
            "attribute_path": path,
            "attribute_type": "float_series",
            "step": step,
            "timestamp": datetime.fromtimestamp(BEGIN + step, UTC),
            "float_value": value,
        }
        for step in range(rows)
        # The exporter writes NaN as nothing.
        for path, value in (("train/loss", 3 / (step + 1)), ("odd", None if step == 3 else step / 3))
    ]
    columns: list[tuple[str, pa.DataType]] = [
        *((name, pa.string()) for name in ("project_id", "run_id", "attribute_path", "attribute_type")),
        ("step", pa.decimal128(18, 6)),
        ("timestamp", pa.timestamp("ms", tz="UTC")),
        ("int_value", pa.int64()),
        ("float_value", pa.float64()),
        ("string_value", pa.string()),
        ("bool_value", pa.bool_()),
        ("datetime_value", pa.timestamp("ms", tz="UTC")),
        ("string_set_value", pa.list_(pa.string())),
        ("file_value", pa.struct([("path", pa.string())])),
    ]
    half = len(values) // 2
    for number, part in enumerate((values[:half], values[half:])):
        table = pa.Table.from_pylist(part, pa.schema(columns))
        parquet.write_table(table, folder / f"RUN-1-549fcb30_part_{number}.parquet")
    return folder / "RUN-1-549fcb30_part_0.parquet"


def write_aim(folder: Path, rows: int = 20) -> Path:
    """A repository with a run, and another one that was killed."""
    from agent.helpers.aim_repository import AimRepository  # aimrocks has no wheels for Python 3.13.

    repository = AimRepository(folder)
    hyper = {"lr": 1e-3, "seed": 7, "layers": [1, {"x": True}], "none": None}
    loss = [(step, 3 / (step + 1), step // 10, BEGIN + step) for step in range(rows)]
    odd = [(step, math.nan if step == 3 else 10.0**-step, None, BEGIN + step + 0.5) for step in range(20)]
    for identity, ended_at in (("3f0c9c5e00004000", BEGIN + rows), ("9ab1b7e900004000", None)):
        repository.write_run(
            identity,
            name="" if ended_at is None else "gpt fp8",
            experiment="exp",
            tags=["a", "b"],
            parameters={"hparams": hyper, "batch": 4},
            metrics=[
                ("loss", {"subset": "train"}, loss),
                ("loss", {"subset": "val", "rank": 0}, loss[::5]),
                ("odd", {}, odd),
            ],
            images=2,
            created_at=BEGIN,
            ended_at=ended_at,
        )
    return folder


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(BEGIN + seconds, UTC).isoformat()


WRITERS: dict[str, Callable[[Path], Path]] = {
    "csv": write_csv,
    "jsonl": write_jsonl,
    "parquet": write_parquet,
    "lm-eval": write_lm_eval,
    "lighteval": write_lighteval,
    "opencompass": write_opencompass,
    "wandb": write_wandb,
    "mlflow": write_mlflow_files,
    "mlflow-sqlite": write_mlflow_sqlite,
    "trackio": write_trackio,
    "te-inspect": write_inspect_log,
    "megatron": write_megatron,
    "neptune": write_neptune,
}
if sys.version_info < (3, 13):
    WRITERS["aim"] = write_aim
