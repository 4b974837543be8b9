"""Turn text into files of tokens.

train.py calls prepare() when its data is not there yet. By hand:

    python data/prepare.py python               # this Python's standard library, 11 MB
    python data/prepare.py shakespeare          # 1.1 MB, downloaded
    python data/prepare.py fineweb --shards 10  # FineWeb, 100M GPT-2 tokens a shard
    python data/prepare.py my.txt               # any text of yours

A token file (.bin) has the layout of the public FineWeb shards: a header of 256 int32
(magic 20240520, version 1, number of tokens), then the tokens as uint16. The tokens of
a text are its bytes, a vocabulary of 256. FineWeb has GPT-2's vocabulary.
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

# ---- Tokens ----

def vocabulary(name):
    """The vocabulary size of a data set: GPT-2's for FineWeb, bytes for all others."""
    return 50257 if name == "fineweb" else 256

def gpt2():
    """GPT-2's tokenizer. It downloads its vocabulary once."""
    try:
        return tiktoken.get_encoding("gpt2")
    except OSError as e:
        raise OSError(f"GPT-2's vocabulary could not be downloaded: {e}") from e

def encode(text, vocab_size):
    """The tokens of a text, a list."""
    # Under LANG=C a command line's "ö" comes as two surrogates. This makes bytes of it
    data = text.encode(errors="surrogateescape")
    if vocab_size == 256:
        return list(data)
    return gpt2().encode_ordinary(data.decode(errors="replace"))

def decode(tokens, vocab_size):
    """The text of tokens, or why there is none."""
    if vocab_size == 256:
        return bytes(tokens).decode(errors="replace")
    try:
        return gpt2().decode(tokens)
    except OSError as e:
        return f"(no text: {e})"

# ---- Files ----

def write_tokens(path, tokens):
    """Write a token file. tokens: ints under 65536. It gets its name when it is whole,
    so that a process that is killed leaves no half file."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = MAGIC, VERSION, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    part.write_bytes(header.tobytes() + np.asarray(tokens, dtype=np.uint16).tobytes())
    os.replace(part, path)

def read_tokens(path):
    """The tokens of a file, memory-mapped: uint16 (n,). ValueError, with the name of
    the file, if it is not whole."""
    header = np.fromfile(path, dtype=np.int32, count=256).tolist()
    size, n = os.path.getsize(path), header[2] if len(header) == 256 else 0
    if header[:2] != [MAGIC, VERSION] or size != HEADER + 2 * n:
        raise ValueError(f"{path} is damaged, or no token file of version {VERSION}: "
                         "delete it, and train.py makes it again")
    return np.memmap(path, dtype=np.uint16, mode="r", offset=HEADER, shape=(n,))

def download(url, path):
    """Fetch url to path. The file gets its name when it is whole. OSError, with what to
    do, if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with urllib.request.urlopen(url, timeout=60) as response, open(part, "wb") as f:
            total = int(response.headers.get("Content-Length", 0))
            with tqdm(desc=path.name, total=total, unit="B", unit_scale=True) as bar:
                while chunk := response.read(1 << 20):
                    f.write(chunk)
                    bar.update(len(chunk))
        if part.stat().st_size < total:
            raise OSError(f"it broke off at {part.stat().st_size} of {total} bytes")
        if path.suffix == ".bin" and read_tokens(part).max() >= vocabulary("fineweb"):
            raise ValueError("its tokens are not GPT-2's")
        os.replace(part, path)
    except (OSError, ValueError, http.client.HTTPException) as e:
        raise OSError(f"could not download {url}: {e}. Try again, or without a network "
                      "use --data python or a text file of yours, or put the file at "
                      f"{path}") from e
    finally:
        part.unlink(missing_ok=True)

# ---- Data sets ----

def standard_library():
    """The source of Python's standard library: bytes to train on, and for validation.
    The CRC of a file's name picks one file in twenty for validation."""
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

def split(path):
    """The bytes of a text, of which the last tenth is for validation."""
    data = path.read_bytes()
    cut = len(data) * 9 // 10
    if not data.strip() or not cut:
        raise ValueError(f"{path} holds no text")
    return data[:cut], data[cut:]

def prepare(name="python", root=ROOT, shards=1, url=FINEWEB):
    """Make a data set's files where they are missing -> Dataset.

    name: "python", "shakespeare", "fineweb" or a text file. ValueError for a name or a
    text that cannot be used, OSError for a download that failed."""
    root = Path(root)
    if name == "fineweb":
        folder = root / name
        val = folder / "fineweb_val_000000.bin"
        for path in [val] + [folder / f"fineweb_train_{i:06d}.bin"
                             for i in range(1, shards + 1)]:
            if not path.exists():
                download(f"{url}/{path.name}", path)
        train = sorted(folder.glob("fineweb_train_*.bin"))
        return Dataset(train, [val], vocabulary(name))
    if name == "python":
        folder = root / f"python-{platform.python_version()}"
    elif name == "shakespeare":
        folder = root / name
        text = folder / "input.txt"
    elif Path(name).is_file():
        text = Path(name)
        crc = zlib.crc32(text.read_bytes())     # another content is another data set
        folder = root / f"{text.stem}-{crc:08x}"
    else:
        raise ValueError(f"no data set or file is called {name!r}: take python, "
                         "shakespeare, fineweb, or a text file")
    train, val = folder / "train.bin", folder / "val.bin"
    if not (train.exists() and val.exists()):
        if name == "shakespeare" and not text.exists():
            download(SHAKESPEARE, text)
        parts = standard_library() if name == "python" else split(text)
        for path, part in zip((train, val), parts):
            write_tokens(path, np.frombuffer(part, dtype=np.uint8))     # token = byte
    return Dataset([train], [val], vocabulary(name))

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
