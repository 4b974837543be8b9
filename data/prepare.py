"""Turn text into files of tokens.

train.py calls prepare() when its data is not there yet. By hand:

    python data/prepare.py python               # this Python's standard library, 11 MB
    python data/prepare.py shakespeare          # 1.1 MB, downloaded
    python data/prepare.py fineweb --shards 10  # FineWeb, 100M GPT-2 tokens a shard
    python data/prepare.py my.txt               # any text of yours

A token file (.bin) has the layout of the public FineWeb shards: a header of 256 int32
(magic 20240520, version 1, number of tokens), then the tokens as uint16. The tokens of
a text are its bytes, a vocabulary of 256. FineWeb has GPT-2's vocabulary. A file gets
its name when it is complete, so one that is there is whole.
"""
import argparse
import http.client
import os
import platform
import sys
import sysconfig
import urllib.request
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent
MAGIC, VERSION, HEADER = 20240520, 1, 256 * 4
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
               "tinyshakespeare/input.txt")
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"

@dataclass
class Dataset:
    train: list                 # paths of token files
    val: list
    vocab_size: int

def vocabulary(name):
    """Vocabulary of a data set: FineWeb has GPT-2's, text is bytes."""
    return 50257 if name == "fineweb" else 256

def decode(tokens, vocab_size):
    """The text of tokens, or why there is none."""
    if vocab_size == 256:
        return bytes(tokens).decode(errors="replace")
    try:
        # This downloads the vocabulary once
        return tiktoken.get_encoding("gpt2").decode(tokens)
    except OSError as e:
        return f"(no text, because GPT-2's vocabulary could not be downloaded: {e})"

def encode(text, vocab_size):
    """The tokens of a text, a list. OSError if the vocabulary cannot be downloaded."""
    if vocab_size == 256:
        return list(text.encode())
    try:
        return tiktoken.get_encoding("gpt2").encode_ordinary(text)
    except OSError as e:
        raise OSError("the prompt needs GPT-2's vocabulary, which could not be "
                      f"downloaded: {e}") from e

def write_tokens(path, tokens):
    """Write a token file, atomically. tokens: ints under 65536."""
    if len(tokens) >= 2**31:
        raise ValueError(f"{path} can't hold {len(tokens)} tokens, only fewer than "
                         "2^31")
    header = np.zeros(256, dtype=np.int32)
    header[:3] = MAGIC, VERSION, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_bytes(header.tobytes() + np.asarray(tokens, dtype=np.uint16).tobytes())
    os.replace(part, path)

def read_tokens(path, vocab_size=None):
    """The tokens of a file, memory-mapped: uint16 (n,).

    With vocab_size all of them are read, and compared with it. ValueError, with the
    name of the file, if it is damaged or is no token file."""
    size = os.path.getsize(path)
    header = np.fromfile(path, dtype=np.int32, count=256)
    if len(header) < 256 or header[0] != MAGIC or header[1] != VERSION:
        raise ValueError(f"{path} is not a token file of version {VERSION}")
    if size != HEADER + 2 * int(header[2]):
        raise ValueError(f"{path} is damaged: {size} bytes can't be a header and its "
                         f"{header[2]} tokens; delete it and prepare it again")
    tokens = np.memmap(path, dtype=np.uint16, mode="r", offset=HEADER,
                       shape=(int(header[2]),))
    if vocab_size is not None and len(tokens):
        largest = int(tokens.max())
        if largest >= vocab_size:
            raise ValueError(f"{path} has a token {largest}, beyond the vocabulary of "
                             f"{vocab_size}: it is another tokenizer's; delete it and "
                             "prepare it again")
    return tokens

def download(url, path, check=None):
    """Fetch url to path. It goes on from what an earlier try has left.

    Then it compares the size, and calls check(part), which raises ValueError if the
    file is not what it should be. OSError, with what to do, if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    have = part.stat().st_size if part.exists() else 0
    headers = {"Range": f"bytes={have}-"} if have else {}
    request = urllib.request.Request(url, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            if response.status != 206:              # it comes from the first byte on
                have = 0
            length = response.headers.get("Content-Length")
            total = have + int(length) if length else None
            bar = tqdm(total=total, initial=have, unit="B", unit_scale=True,
                       desc=path.name)
            with bar, open(part, "ab" if have else "wb") as f:
                while chunk := response.read(1 << 20):
                    f.write(chunk)
                    bar.update(len(chunk))
        if total and part.stat().st_size != total:
            raise OSError(f"it broke off at {part.stat().st_size} of {total} bytes")
    # URLErrors and timeouts are OSErrors, too
    except (OSError, http.client.HTTPException) as e:
        # 416: there is nothing beyond `have`. The part is whole or too long, so again
        if have and getattr(e, "code", None) == 416:
            part.unlink()
            return download(url, path, check)
        raise OSError(f"could not download {url}: {e}. What has arrived is kept, and "
                      "the next try goes on from there. Without a network, use --data "
                      "python or a text file of yours, or put the file at "
                      f"{path}") from e
    try:
        if check:
            check(part)
    except ValueError as e:
        part.unlink()
        raise OSError(f"what {url} sent is not what it should be, and was deleted: "
                      f"{e}") from e
    os.replace(part, path)

def stdlib_bytes(folder):
    """The standard library's source. The CRC of a file's name says which one in twenty
    is for validation."""
    lib = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3",
            "turtledemo", "__pycache__"}
    train, val = [], []
    for path in sorted(lib.rglob("*.py")):
        name = path.relative_to(lib)
        if not skip & set(name.parts):
            part = val if zlib.crc32(name.as_posix().encode()) % 20 == 0 else train
            part.append(path.read_bytes())
    if not train or not val:
        raise ValueError(f"found no standard library source in {lib}; use --data with "
                         "a text file")
    return b"".join(train), b"".join(val)

def text_bytes(path):
    """A text, of which the last tenth is for validation."""
    data = path.read_bytes()
    cut = len(data) * 9 // 10
    if not data.strip() or not cut:
        raise ValueError(f"{path} holds no text")
    return data[:cut], data[cut:]

def shakespeare_bytes(folder):
    if not (folder / "input.txt").exists():
        download(SHAKESPEARE, folder / "input.txt")
    return text_bytes(folder / "input.txt")

def prepare(name="python", root=ROOT, shards=1, url=FINEWEB):
    """Make a data set if it is not there yet -> Dataset.

    name: "python", "shakespeare", "fineweb" or a text file. ValueError for a name or a
    text that cannot be used, OSError for a download that failed."""
    root = Path(root)
    if name == "fineweb":
        folder = root / name
        val = folder / "fineweb_val_000000.bin"
        for path in [val] + [folder / f"fineweb_train_{i:06d}.bin"
                             for i in range(1, shards + 1)]:
            if not path.exists():
                download(f"{url}/{path.name}", path, read_tokens)
        train = sorted(folder.glob("fineweb_train_*.bin"))
        return Dataset(train, [val], vocabulary(name))
    if name == "python":
        folder, make = root / f"python-{platform.python_version()}", stdlib_bytes
    elif name == "shakespeare":
        folder, make = root / name, shakespeare_bytes
    elif Path(name).is_file():
        source = Path(name)
        crc = zlib.crc32(source.read_bytes())   # another content is another data set
        folder, make = root / f"{source.stem}-{crc:08x}", lambda _: text_bytes(source)
    else:
        raise ValueError(f"no data set or file is called {name!r}: take python, "
                         "shakespeare, fineweb, or a text file")
    train, val = folder / "train.bin", folder / "val.bin"
    if not val.exists():                                # written last
        for path, text in zip((train, val), make(folder)):
            write_tokens(path, np.frombuffer(text, dtype=np.uint8))     # token = byte
    return Dataset([train], [val], vocabulary(name))

def check(dataset, context):
    """ValueError if a file is damaged, or has no `context` tokens."""
    for path in dataset.train + dataset.val:
        n = len(read_tokens(path, dataset.vocab_size))
        if n < context:
            raise ValueError(f"{path} has {n} tokens, fewer than a context and its "
                             f"target, {context}; give more text or a smaller "
                             "--seq-len")

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare a data set for train.py.")
    parser.add_argument("name", nargs="?", default="python",
                        help="python, shakespeare, fineweb, or a text file")
    parser.add_argument("--shards", type=int, default=1,
                        help="of fineweb, 100M tokens each")
    args = parser.parse_args()
    try:
        dataset = prepare(args.name, shards=args.shards)
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: {error}")
    for path in dataset.train + dataset.val:
        print(f"{path}: {len(read_tokens(path)):,} tokens")
