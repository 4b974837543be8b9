"""Turn text into files of tokens.

train.py calls prepare(), which makes what is not there yet. By hand:

    python data/prepare.py python               # this Python's standard library, 11 MB
    python data/prepare.py shakespeare          # 1.1 MB, downloaded
    python data/prepare.py fineweb --shards 10  # FineWeb, 100M GPT-2 tokens a shard
    python data/prepare.py my.txt               # any text of yours

A token file (.bin) has the layout of the public FineWeb shards: a header of 256 int32
(magic 20240520, version 1, number of tokens), then the tokens as uint16. The tokens of
a text are its bytes, a vocabulary of 256. FineWeb has GPT-2's vocabulary.
"""
import argparse
import os
import platform
import sys
import sysconfig
import urllib.request
import zlib
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent
MAGIC, VERSION, HEADER_BYTES = 20240520, 1, 256 * 4
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
               "tinyshakespeare/input.txt")
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"

# ---- Tokens ----

def vocabulary(name):
    """The vocabulary size of a data set: GPT-2's for FineWeb, bytes for all others."""
    return 50257 if name == "fineweb" else 256

def encode(text, vocab_size):
    """The tokens of a text, a list."""
    if vocab_size == 256:
        return list(text.encode())
    return tiktoken.get_encoding("gpt2").encode_ordinary(text)

def decode(tokens, vocab_size):
    """The text of tokens."""
    if vocab_size == 256:
        return bytes(tokens).decode(errors="replace")
    return tiktoken.get_encoding("gpt2").decode(tokens)

# ---- Files ----
# Files are written under another name, and renamed when they are complete.

def write_tokens(path, tokens):
    """Write a token file. tokens: ints under 65536."""
    header = np.zeros(256, dtype=np.int32)
    header[:3] = MAGIC, VERSION, len(tokens)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    tokens = np.asarray(tokens, dtype=np.uint16)
    temporary.write_bytes(header.tobytes() + tokens.tobytes())
    os.replace(temporary, path)

def read_tokens(path):
    """The tokens of a file, memory-mapped: uint16 (n,). ValueError if it is damaged."""
    header = np.fromfile(path, dtype=np.int32, count=256).tolist()
    if (len(header) < 256 or header[:2] != [MAGIC, VERSION]
            or os.path.getsize(path) != HEADER_BYTES + 2 * header[2]):
        raise ValueError(f"{path} is damaged: delete it, and train.py makes it again")
    return np.memmap(path, np.uint16, "r", offset=HEADER_BYTES, shape=header[2])

def download(url, path):
    """Fetch url to path. OSError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        with tqdm(desc=path.name, unit="B", unit_scale=True) as bar:
            urllib.request.urlretrieve(url, temporary,
                                       lambda n, size, _: bar.update(size))
        os.replace(temporary, path)
    except OSError as e:
        raise OSError(f"could not download {url}: {e}. Without a network use --data "
                      f"python or a text file of yours, or put the file at {path}")
    finally:
        temporary.unlink(missing_ok=True)

# ---- Data sets ----

def standard_library():
    """The source of Python's standard library -> (training bytes, validation bytes).
    One file in twenty is for validation, chosen by a hash of the names."""
    lib = Path(sysconfig.get_paths()["stdlib"])
    skip = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3",
            "turtledemo", "__pycache__"}
    train, val = [], []
    for path in sorted(lib.rglob("*.py")):
        name = path.relative_to(lib)
        if not skip & set(name.parts):
            split = val if zlib.crc32(name.as_posix().encode()) % 20 == 0 else train
            split.append(path.read_bytes())
    return b"".join(train), b"".join(val)

def prepare(name="python", root=ROOT, shards=1, url=FINEWEB):
    """Make the token files of a data set, if they are missing. Returns the paths of the
    files to train on, a list, and the path of the validation file.

    name: "python", "shakespeare", "fineweb" or a text file. shards: how many shards of
    FineWeb to download, at least. train.py takes all that are there. ValueError for any
    other name, OSError for a failed download."""
    if name == "fineweb":
        folder = root / name
        for part in ["val_000000", *(f"train_{i:06d}" for i in range(1, shards + 1))]:
            path = folder / f"fineweb_{part}.bin"
            if not path.exists():
                download(f"{url}/{path.name}", path)
        return sorted(folder.glob("*_train_*.bin")), folder / "fineweb_val_000000.bin"
    source = None                               # the text file, if there is one
    if name == "python":
        folder = root / f"python-{platform.python_version()}"
    elif name == "shakespeare":
        folder = root / name
        source = folder / "input.txt"
    elif Path(name).is_file():
        source = Path(name)
        crc = zlib.crc32(source.read_bytes())   # an edited file is a new data set
        folder = root / f"{source.stem}-{crc:08x}"
    else:
        raise ValueError(f"no data set or file is called {name!r}: take python, "
                         "shakespeare, fineweb, or a text file")
    train, val = folder / "train.bin", folder / "val.bin"
    if not (train.exists() and val.exists()):
        if name == "shakespeare" and not source.exists():
            download(SHAKESPEARE, source)
        if source is None:
            parts = standard_library()
        else:
            data = source.read_bytes()
            cut = len(data) * 9 // 10           # the last tenth is for validation
            parts = data[:cut], data[cut:]
        for path, part in zip((train, val), parts):
            write_tokens(path, np.frombuffer(part, dtype=np.uint8))     # token = byte
    return [train], val

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare a data set for train.py.")
    parser.add_argument("name", help="python, shakespeare, fineweb, or a text file")
    parser.add_argument("--shards", type=int, default=1, help="how many FineWeb shards")
    args = parser.parse_args()
    try:
        train, val = prepare(args.name, shards=args.shards)
        for path in *train, val:
            print(f"{path}: {len(read_tokens(path)):,} tokens")
    except (ValueError, OSError) as error:
        sys.exit(f"prepare.py: {error}")
