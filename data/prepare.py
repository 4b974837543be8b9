"""Turn text into files of tokens.

train.py calls prepare(), which makes what is not there yet. By hand:

    python data/prepare.py python               # this Python's standard library, 11 MB
    python data/prepare.py shakespeare          # 1.1 MB, downloaded
    python data/prepare.py fineweb --shards 10  # FineWeb, 100M GPT-2 tokens a shard
    python data/prepare.py my.txt               # any text file

A folder of token files is data as well. All .bin files with the word "train" in their
names are trained on. The first with the word "val" is for validation.

A token file (.bin) has the layout of the public FineWeb shards: a header of 256 int32
(magic 20240520; version 1; number of tokens, in two of them; vocabulary size, 0 for
GPT-2's), then the tokens as uint16. With version 2 they are uint32, for vocabularies
above 65,536. write_tokens() writes both. The tokens of a text are its bytes, a
vocabulary of 256. FineWeb has GPT-2's vocabulary.

nanoGPT's files have no header. They are read if its meta.pkl is beside them, or if they
are its openwebtext, a folder of that name: train.bin and val.bin in GPT-2's vocabulary.
"""
import argparse
import os
import pickle
import platform
import re
import sys
import sysconfig
import urllib.request
import zlib
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import tiktoken
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent
MAGIC, HEADER_BYTES = 20240520, 256 * 4
DTYPES = {1: np.uint16, 2: np.uint32}           # by the version in the header
GPT2 = 50257                        # the vocabulary of FineWeb, and of openwebtext
CHUNK = 1 << 24                     # tokens that are converted at a time
NAMES = ("python", "shakespeare", "fineweb")
SHAKESPEARE = ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
               "tinyshakespeare/input.txt")
FINEWEB = "https://huggingface.co/datasets/kjj0/fineweb10B-gpt2/resolve/main"

class UserError(ValueError):
    """A mistake in what the user gave. Programs print its message alone."""

# ---- Tokens ----

class PlainUnpickler(pickle.Unpickler):
    """Reads dicts, texts and numbers. Other pickles could run any code."""
    def find_class(self, module, name):
        raise UserError(f"meta.pkl holds {module}.{name}, where only dicts, texts and "
                        "numbers are read")

def read_meta(data):
    """nanoGPT's meta.pkl of a folder: {"vocab_size": ..., "stoi": {character: token},
    "itos": {token: character}}, or {} if there is none."""
    path = Path(data) / "meta.pkl"
    if data in NAMES or not path.is_file():
        return {}
    with open(path, "rb") as file:
        return PlainUnpickler(file).load()

def vocabulary(data):
    """The vocabulary size of a data set: bytes for a text, GPT-2's for FineWeb, and for
    a folder what meta.pkl or the token files say."""
    if data == "fineweb":
        return GPT2
    if data in NAMES or not Path(data).is_dir():
        return 256
    paths, _ = token_files(data)
    return int(read_meta(data).get("vocab_size") or header_of(paths[0])[4] or GPT2)

def gpt2(data):
    """GPT-2's tokenizer, if that is the vocabulary of data."""
    if vocabulary(data) != GPT2:
        raise UserError(f"{data} has a vocabulary of {vocabulary(data)}, and no stoi "
                        "and itos in a meta.pkl, which say what its tokens mean")
    return tiktoken.get_encoding("gpt2")

def encode(text, data):
    """The tokens of a text, a list."""
    if stoi := read_meta(data).get("stoi"):
        unknown = set(text) - set(stoi)
        if unknown:
            raise UserError(f"the vocabulary of {data} lacks {sorted(unknown)}")
        return [stoi[character] for character in text]
    if vocabulary(data) == 256:
        return list(text.encode())
    return gpt2(data).encode_ordinary(text)

def decode(tokens, data):
    """The text of tokens."""
    if itos := read_meta(data).get("itos"):
        return "".join(itos[token] for token in tokens)
    if vocabulary(data) == 256:
        return bytes(tokens).decode(errors="replace")
    return gpt2(data).decode(tokens)

# ---- Files ----

@contextmanager
def whole(path):
    """Yields another name to write to. It is renamed to `path` once all is written, so
    what is at `path` is whole. If that fails, nothing is left behind."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)

def make_header(count, vocab_size=0, version=1):
    """256 int32. A count above 2^31 needs two of them, so it is written as an int64.
    (In the shards of FineWeb the upper half is 0, and so is the vocabulary size.)"""
    header = np.zeros(256, dtype=np.int32)
    header[:2] = MAGIC, version
    header[2:4].view(np.int64)[0] = count
    header[4] = vocab_size
    return header

def header_of(path):
    """The header of a token file, or zeros if it has none."""
    header = np.fromfile(path, dtype=np.int32, count=256)
    good = len(header) == 256 and header[0] == MAGIC and header[1] in DTYPES
    return header if good else np.zeros(256, dtype=np.int32)

def write_tokens(path, tokens, vocab_size=0):
    """Write a token file. tokens: a list or an array of ints from 0 to 2^32 - 1. They
    take two bytes each, or four if one of them or the vocabulary needs it."""
    path, tokens = Path(path), np.asarray(tokens)
    low, high = (tokens.min(), tokens.max()) if len(tokens) else (0, 0)
    if low < 0 or high >= 2**32:
        raise UserError(f"a token must be from 0 to 2^32 - 1, not {min(low, high)} or "
                        f"{high}")
    version = 2 if max(int(high), vocab_size - 1) >= 2**16 else 1
    path.parent.mkdir(parents=True, exist_ok=True)
    with whole(path) as temporary, open(temporary, "wb") as file:
        file.write(make_header(len(tokens), vocab_size, version).tobytes())
        for first in range(0, len(tokens), CHUNK):
            part = tokens[first:first + CHUNK]
            file.write(part.astype(DTYPES[version]).tobytes())

def read_tokens(path):
    """The tokens of a file, memory-mapped: uint16 or uint32 (n,). UserError if it is
    damaged, or no token file."""
    size, header, folder = os.path.getsize(path), header_of(path), Path(path).parent
    meta = read_meta(folder)
    if not header.any() and size and (meta or folder.name == "openwebtext"):
        if meta.get("vocab_size", GPT2) > 2**16:        # as nanoGPT's have no header
            raise UserError(f"{path} has no header, and {folder}/meta.pkl a vocabulary "
                            "above 65,536, which two bytes a token can't hold: write "
                            "it with write_tokens() of data/prepare.py")
        return np.memmap(path, np.uint16, "r")
    is_ours = ROOT in Path(path).resolve().parents      # so prepare() has made it
    if not header.any() and not is_ours:
        raise UserError(f"{path} has no header of a token file (see data/prepare.py). "
                        "Of files without one, those of nanoGPT are read if their "
                        "meta.pkl is beside them")
    count, dtype = int(header[2:4].view(np.int64)[0]), DTYPES.get(header[1], np.uint16)
    if not header.any() or size != HEADER_BYTES + dtype(0).itemsize * count:
        again = ": delete it, and train.py makes it again" if is_ours else ""
        raise UserError(f"{path} is damaged{again}")
    return np.memmap(path, dtype, "r", offset=HEADER_BYTES, shape=count)

def files_called(folder, part):
    """The .bin files with this word in their names, "train" or "val". ("validation"
    will do, "medieval" will not.)"""
    word = {"train": "train(ing)?", "val": "val(id(ation)?)?"}[part]
    word = re.compile(f"(?<![a-z]){word}(?![a-z])", re.IGNORECASE)
    return sorted(path for path in Path(folder).glob("*.bin") if word.search(path.stem))

def has_tokens(folder):
    val = files_called(folder, "val")
    return bool(val) and any(path != val[0] for path in files_called(folder, "train"))

def token_files(folder):
    """-> (paths of the files to train on, path of the validation file)"""
    if not has_tokens(folder):
        raise UserError(f"the folder {folder} has no token files (.bin) with the words "
                        "train and val in their names")
    val, *_ = files_called(folder, "val")
    return [path for path in files_called(folder, "train") if path != val], val

def download(url, path):
    """Fetch url to path. UserError if that fails."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with (whole(path) as temporary,
              tqdm(desc=path.name, unit="B", unit_scale=True) as bar):
            urllib.request.urlretrieve(url, temporary,
                                       lambda n, size, _: bar.update(size))
    except OSError as e:
        raise UserError(f"could not download {url}: {e}. Without a network use --data "
                        f"python or a text file of yours, or put the file at {path}")

def read_text(path):
    """The bytes of a text file, memory-mapped. UserError if it is no text."""
    if not path.stat().st_size:
        raise UserError(f"{path} is empty")
    text = np.memmap(path, np.uint8, "r")
    if not text[:CHUNK].all():
        raise UserError(f"{path} is not a text file: it has bytes of 0. If it holds "
                        "tokens, give its folder")
    return text

# ---- Data sets ----

def check_name(data):
    """UserError if data is no name of a data set, and no file or folder."""
    if data not in NAMES and not Path(data).exists():
        raise UserError(f"no data set or file is called {data!r}: use python, "
                        "shakespeare, fineweb, a text file or a folder of token files")

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

def prepare(data="python", root=None, shards=1, url=FINEWEB):
    """Make the token files of a data set, if they are missing. Returns the paths of the
    files to train on, a list, and the path of the validation file.

    data: "python", "shakespeare", "fineweb", a text file or a folder of token files.
    shards: how many shards of FineWeb to download, at least. train.py uses all that are
    there. UserError for any other name, and for a failed download."""
    check_name(data)
    root = root or ROOT
    if data == "fineweb":
        folder = root / data
        for part in ["val_000000", *(f"train_{i:06d}" for i in range(1, shards + 1))]:
            path = folder / f"fineweb_{part}.bin"
            if not path.exists():
                download(f"{url}/{path.name}", path)
        return token_files(folder)
    if data == "python":
        folder = root / f"python-{platform.python_version()}"
    elif data == "shakespeare":
        folder = root / data
    elif Path(data).is_dir():
        return token_files(data)
    else:
        source = read_text(Path(data))
        crc = zlib.crc32(source)                # an edited file is a new data set
        folder = root / f"{Path(data).stem}-{crc:08x}"
    train, val = folder / "train.bin", folder / "val.bin"
    if not (train.exists() and val.exists()):
        if data == "shakespeare":
            source = folder / "input.txt"
            if not source.exists():
                download(SHAKESPEARE, source)
            source = read_text(source)
        if data == "python":
            parts = [np.frombuffer(part, np.uint8) for part in standard_library()]
        else:
            cut = len(source) * 9 // 10         # the last tenth is for validation
            parts = source[:cut], source[cut:]
        for path, part in zip((train, val), parts):
            write_tokens(path, part, 256)                           # token = byte
    return [train], val

if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Prepare a data set for train.py.")
    parser.add_argument("data", help="python, shakespeare, fineweb, or a text file")
    parser.add_argument("--shards", type=int, default=1, help="how many FineWeb shards")
    args = parser.parse_args()
    try:
        train, val = prepare(args.data, shards=args.shards)
        for path in *train, val:
            print(f"{path}: {len(read_tokens(path)):,} tokens")
    except (UserError, OSError) as error:
        sys.exit(f"prepare.py: {error}")
