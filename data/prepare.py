"""Data: text in, token files out. train.py calls `prepare` when its data is not there yet; by hand:

    python data/prepare.py python              # default: this Python's standard library, 11 MB
    python data/prepare.py shakespeare         # 1.1 MB, downloaded
    python data/prepare.py fineweb --shards 10 # FineWeb, 100M GPT-2 tokens a shard
    python data/prepare.py my.txt              # any text of yours

A token file (.bin) is a header of 256 int32 (magic 20240520, version 1, number of tokens) and then
uint16 tokens: the layout of the public FineWeb shards, used for everything. Text becomes bytes,
vocabulary 256; FineWeb has GPT-2's 50257. Every file is written under another name and renamed when
complete, so one that is there is whole.
"""
import argparse
import http.client
import os
import sys
import sysconfig
import urllib.error
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent
MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/"
               "input.txt")
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"

@dataclass
class Dataset:
    train: list                 # paths of token files
    val: list
    vocab_size: int
    encoding: str               # "bytes" or "gpt2"

def encoding(name):
    """The tiktoken Encoding "bytes" (token i is byte i) or "gpt2" (which needs a download)."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"[^\n]*\n?", special_tokens={},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    return tiktoken.get_encoding(name)

def write_tokens(path, tokens):
    """Write a token file, atomically. tokens: any sequence of ints under 65536; ValueError if the
    header can't count them."""
    if len(tokens) >= 2**31:
        raise ValueError(f"{path} can't hold {len(tokens)} tokens, only fewer than 2^31; give less "
                         "text")
    header = np.zeros(256, dtype=np.int32)
    header[:3] = MAGIC, VERSION, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with open(part, "wb") as f:
        f.write(header.tobytes())
        f.write(np.asarray(tokens, dtype=np.uint16).tobytes())
        f.flush()
        os.fsync(f.fileno())
    os.replace(part, path)

def vocabulary(name):
    """Vocabulary of a data set: FineWeb has GPT-2's, text is bytes."""
    return 50257 if name == "fineweb" else 256

def read_tokens(path, vocab_size=None):
    """The tokens of a file, memory-mapped: uint16 (n,). With vocab_size all of them are read and
    checked against it. ValueError, naming the file, if it is damaged or foreign."""
    size = os.path.getsize(path)
    header = np.fromfile(path, dtype=np.int32, count=256)
    if len(header) < 256 or header[0] != MAGIC or header[1] != VERSION:
        raise ValueError(f"{path} is not a token file (its header is not magic {MAGIC}, version "
                         f"{VERSION})")
    if size != HEADER + 2 * int(header[2]):
        raise ValueError(f"{path} is damaged: its header promises {header[2]} tokens, "
                         f"{HEADER + 2 * int(header[2])} bytes, but it has {size}; delete it and "
                         "prepare it again")
    tokens = np.memmap(path, dtype=np.uint16, mode="r", offset=HEADER, shape=(int(header[2]),))
    if vocab_size is not None and len(tokens) and (largest := int(tokens.max())) >= vocab_size:
        raise ValueError(f"{path} has a token {largest}, beyond the vocabulary of {vocab_size}: "
                         "another tokenizer's; delete it and prepare it again")
    return tokens

def download(url, path, check=None):
    """Fetch url to path: progress bar, resumed after a break, size and `check(part)` verified,
    renamed when whole. OSError with a sentence on what to do if it can't be had."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    try:
        request = urllib.request.Request(url, headers={"Range": f"bytes={have}-"} if have else {})
        try:
            response = urllib.request.urlopen(request, timeout=60)
        except urllib.error.HTTPError as e:
            if e.code != 416:           # nothing left to send, or the part is longer than the file
                raise
            part.unlink()
            have, response = 0, urllib.request.urlopen(url, timeout=60)
        if response.status != 206:      # a server without ranges starts from the first byte
            have = 0
        length = response.headers.get("Content-Length")
        total = None if length is None else have + int(length)
        with response, open(part, "ab" if have else "wb") as f, \
                tqdm(total=total, initial=have, unit="B", unit_scale=True, desc=path.name) as bar:
            while chunk := response.read(1 << 20):
                f.write(chunk)
                bar.update(len(chunk))
    except (OSError, http.client.HTTPException) as e:   # URLErrors and timeouts are OSErrors
        raise OSError(f"could not download {url}: {e}. What has arrived is kept and the next try "
                      "goes on from there. Without a network, use --data python or a text file of "
                      f"yours, or put the file at {path}") from e
    if total is not None and part.stat().st_size != total:
        raise OSError(f"{url} broke off at {part.stat().st_size} of {total} bytes; run the same "
                      "command to go on")
    if check is not None:
        try:
            check(part)
        except ValueError as e:
            part.unlink()
            raise OSError(f"what {url} sent is not what it should be, and was deleted: {e}") from e
    os.replace(part, path)

def split_bytes(data, name):
    """The last tenth is for validation."""
    cut = len(data) * 9 // 10
    if not data.strip() or not cut:
        raise ValueError(f"{name} holds no text")
    return data[:cut], data[cut:]

def stdlib_bytes():
    """The standard library's source, split by file, as the CRC of a file's name says."""
    lib = Path(sysconfig.get_paths()["stdlib"])
    texts = {"train": [], "val": []}
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo",
            "__pycache__"}
    for path in sorted(lib.rglob("*.py")):
        name = path.relative_to(lib)
        if not skip & set(name.parts):
            split = "val" if zlib.crc32(name.as_posix().encode()) % 20 == 0 else "train"
            texts[split].append(path.read_bytes())
    if not texts["train"] or not texts["val"]:
        raise ValueError(f"found no standard library source under {lib}; use --data with a text "
                         "file")
    return b"".join(texts["train"]), b"".join(texts["val"])

def prepare(name="python", root=ROOT, shards=1, url=FINEWEB):
    """Make the data set `name` ("python", "shakespeare", "fineweb" or a text file) if it isn't
    there -> Dataset. ValueError for a name or a text that can't be used, OSError for a download
    that failed."""
    root = Path(root)
    if name == "fineweb":
        numbers = [("val", 0)] + [("train", i) for i in range(1, shards + 1)]
        files = [f"fineweb_{split}_{i:06d}.bin" for split, i in numbers]
        for f in files:
            if not (root / name / f).exists():
                download(f"{url}/{f}", root / name / f, read_tokens)
        train = sorted((root / name).glob("fineweb_train_*.bin"))
        return Dataset(train, [root / name / files[0]], vocabulary(name), "gpt2")
    if name == "python":
        version = ".".join(map(str, sys.version_info[:3]))
        folder, make = root / f"python-{version}", stdlib_bytes
    elif name == "shakespeare":
        folder, raw = root / name, root / name / "input.txt"

        def make():
            if not raw.exists():
                download(SHAKESPEARE, raw)
            return split_bytes(raw.read_bytes(), name)
    elif Path(name).is_file():
        data = Path(name).read_bytes()
        folder = root / f"{Path(name).stem}-{zlib.crc32(data):08x}"     # by its content

        def make():
            return split_bytes(data, name)
    else:
        raise ValueError(f"no data set or file is called {name!r}: take python, shakespeare, "
                         "fineweb, or a text file")
    if not (folder / "val.bin").exists():               # written last
        for split, text in zip(("train", "val"), make()):
            tokens = np.frombuffer(text, dtype=np.uint8)                # token = byte
            write_tokens(folder / f"{split}.bin", tokens)
    return Dataset([folder / "train.bin"], [folder / "val.bin"], vocabulary(name), "bytes")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare a data set for train.py.")
    parser.add_argument("name", nargs="?", default="python",
                        help="python, shakespeare, fineweb, or a text file")
    parser.add_argument("--shards", type=int, default=1,
                        help="fineweb: how many training shards, 100M tokens each")
    args = parser.parse_args()
    try:
        dataset = prepare(args.name, shards=args.shards)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: {error}")
    for path in dataset.train + dataset.val:
        print(f"{path}: {len(read_tokens(path)):,} tokens")
