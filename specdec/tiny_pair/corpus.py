"""The training text of the embedded pair: fetch freely licensed packages by name, keep their running text.

``fetch(folder)`` downloads packages with their ordinary clients (``apt-get download``, ``pip download``) and unpacks
them; ``build(folder)`` turns them into documents by category. Every source is named in ``SOURCES`` with its licence.
Nothing here needs torch, and nothing is random without a seed.
"""

from __future__ import annotations

import ast
import gzip
import html.parser
import random
import re
import struct
import subprocess
import sys
import sysconfig
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path

SEED = 20260  # order of files inside a source; any number does
PIECE_CHARS = 6_000  # characters of one piece: the unit that the prompt check removes, the held-out share takes
MIN_PARAGRAPH_CHARS = 90  # shorter paragraphs of documentation are captions, menus and list crumbs
MIN_DOCUMENT_CHARS = 400  # shorter documents teach little but how to end
MIN_LETTER_SHARE = 0.78  # of a paragraph's characters that are letters or spaces: below are tables and formulas
MAX_CODE_LINE = 140  # characters; longer lines are data
ASCII = {  # typographic quotes, dashes, dots and HTML's paragraph mark
    0x201C: '"',
    0x201D: '"',
    0x2018: "'",
    0x2019: "'",
    0x2014: " - ",
    0x2013: "-",
    0x2026: "...",
    0x00B6: "",
}

WESNOTH = tuple(
    f"wesnoth-1.16-{name}"
    for name in [
        "did",
        "dm",
        "dw",
        "ei",
        "httt",
        "l",
        "low",
        "nr",
        "sof",
        "sota",
        "sotbe",
        "thot",
        "trow",
        "tsg",
        "ttb",
        "utbs",
    ]
)

# name of the source: (Debian or PyPI package, licence)
SOURCES = {
    "janeaustenr": ("r-cran-janeaustenr (Debian)", "texts in the public domain"),
    "brotli": ("brotli (PyPI source archive, its test texts)", "MIT; Alice in Wonderland: public domain"),
    "klauspost": ("golang-github-klauspost-compress-dev (Debian)", "BSD; Tom Sawyer: public domain"),
    "opticks": ("golang-1.19-src (Debian)", "BSD; Newton's Opticks: public domain"),
    "web": ("sword-text-web (Debian)", "World English Bible: public domain"),
    "wesnoth": ("wesnoth-1.16-* campaigns (Debian)", "GPL-2+"),
    "endless_sky": ("endless-sky-data (Debian)", "GPL-3+, CC-BY-SA"),
    "wordnet": ("wordnet-base (Debian)", "WordNet licence (free)"),
    "linux": ("linux-doc-6.1 (Debian)", "GPL-2"),
    "handbook": ("debian-handbook (Debian)", "GPL-2+ or CC-BY-SA-3.0"),
    "reference": ("debian-reference-en (Debian)", "GPL-2+"),
    "postgresql": ("postgresql-doc-15 (Debian)", "PostgreSQL licence"),
    "rust": ("rust-doc (Debian)", "MIT or Apache-2.0"),
    "python_doc": ("python3.11-doc (Debian)", "PSF-2"),
    "jargon": ("dict-jargon (Debian)", "public domain"),
    "sklearn": ("python-sklearn-doc (Debian)", "BSD-3"),
    "docstrings": ("torch, transformers, accelerate of the running Python", "BSD-3, Apache-2.0"),
    "metamath": ("metamath-databases (Debian)", "CC0"),
    "sage": ("sagemath-doc (Debian)", "GPL-2+, CC-BY-SA-3.0"),
    "sympy": ("python-sympy-doc (Debian)", "BSD-3"),
    "gap": ("gap-doc (Debian)", "GPL-2+"),
    "stdlib": ("standard library of the running Python", "PSF-2"),
    "packages": ("networkx, mpmath, scipy, transformers of the running Python", "BSD-3, Apache-2.0"),
    "boost": ("libboost1.81-dev (Debian)", "Boost 1.0"),
    "abseil": ("libabsl-dev (Debian)", "Apache-2.0"),
    "eigen": ("libeigen3-dev (Debian)", "MPL-2.0"),
}
DEBIAN_PACKAGES = [
    "r-cran-janeaustenr",
    "golang-github-klauspost-compress-dev",
    "golang-1.19-src",
    "sword-text-web",
    "endless-sky-data",
    "wordnet-base",
    "linux-doc-6.1",
    "debian-handbook",
    "debian-reference-en",
    "postgresql-doc-15",
    "rust-doc",
    "python3.11-doc",
    "dict-jargon",
    "python-sklearn-doc",
    "metamath-databases",
    "sagemath-doc",
    "python-sympy-doc",
    "gap-doc",
    "libboost1.81-dev",
    "libabsl-dev",
    "libeigen3-dev",
] + list(WESNOTH)
PYPI_SDISTS = ("brotli",)

# category: ((source, most characters taken), ...): prose is held above 60 % and no source drowns the others
MIXTURE = {
    "story": (
        ("janeaustenr", 4_600_000),
        ("brotli", 200_000),
        ("klauspost", 500_000),
        ("web", 1_500_000),
        ("wesnoth", 3_000_000),
        ("endless_sky", 4_000_000),
    ),
    "science": (("opticks", 700_000), ("wordnet", 3_500_000)),
    "systems": (
        ("linux", 5_000_000),
        ("handbook", 1_500_000),
        ("reference", 600_000),
        ("postgresql", 2_500_000),
        ("rust", 2_000_000),
        ("python_doc", 3_000_000),
        ("jargon", 900_000),
    ),
    "learning": (("sklearn", 4_000_000), ("docstrings", 3_000_000)),
    "mathematics": (("metamath", 5_000_000), ("sage", 3_000_000), ("sympy", 1_500_000), ("gap", 1_500_000)),
    "python": (("stdlib", 5_000_000), ("packages", 3_500_000)),
    "cpp": (("boost", 4_500_000), ("abseil", 1_500_000), ("eigen", 1_000_000)),
}


# ---------------------------------------------------------------- fetching


def fetch(folder: Path) -> None:
    """Download and unpack every package that ``folder`` lacks; a second call does nothing."""
    (folder / "downloads").mkdir(parents=True, exist_ok=True)
    for package in DEBIAN_PACKAGES:
        target = folder / package
        if target.exists():
            continue
        subprocess.run(["apt-get", "download", "-q", package], cwd=folder / "downloads", check=True)
        archive = next((folder / "downloads").glob(f"{package}_*.deb"))
        subprocess.run(["dpkg", "-x", str(archive), str(target)], check=True)
    for package in PYPI_SDISTS:
        if (folder / package).exists():
            continue
        arguments = ["download", "--no-deps", "--no-binary", ":all:", "-q", "-d", str(folder / "downloads"), package]
        subprocess.run([sys.executable, "-m", "pip", *arguments], check=True)
        archive = next((folder / "downloads").glob(f"{package}-*.tar.gz"))
        with tarfile.open(archive) as opened:
            opened.extractall(folder / package, filter="data")


# ---------------------------------------------------------------- helpers


def read(path: Path) -> str:
    """Text of a file, unpacked where its name says gzip; undecodable bytes are dropped."""
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    return data.decode("utf-8", errors="ignore")


def plain(text: str) -> str:
    """Typographic quotes, dashes and spaces as ASCII; one space between words."""
    return re.sub(r"\s+", " ", text.translate(ASCII)).strip()


def is_prose(paragraph: str) -> bool:
    """Whether a paragraph is running text: long enough, mostly letters, ending like a sentence."""
    if len(paragraph) < MIN_PARAGRAPH_CHARS or paragraph[-1] not in '.:?!")':
        return False
    letters = sum(character.isalpha() or character == " " for character in paragraph)
    plain_letters = sum(character.isascii() for character in paragraph)
    return letters >= MIN_LETTER_SHARE * len(paragraph) and plain_letters >= 0.97 * len(paragraph)


def shuffled(paths: Iterator[Path]) -> list[Path]:
    """The paths in a seeded order that does not depend on the file system."""
    ordered = sorted(paths)
    random.Random(SEED).shuffle(ordered)
    return ordered


def prose_document(paragraphs: list[str], seen: set[int]) -> str:
    """The prose among the paragraphs, each of them once in the whole corpus."""
    kept = []
    for paragraph in map(plain, paragraphs):
        key = hash(paragraph)
        if is_prose(paragraph) and key not in seen:
            seen.add(key)
            kept.append(paragraph)
    return "\n\n".join(kept)


class _Paragraphs(html.parser.HTMLParser):
    """Collects the text of paragraphs (<p>, or <div class="para">) and leaves out everything else."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._open = False

    def handle_starttag(self, tag: str, attrs: list) -> None:
        if tag == "p" or (tag == "div" and ("class", "para") in attrs):
            self._open = True
            self.paragraphs.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in ("p", "div", "table", "pre"):
            self._open = False

    def handle_data(self, data: str) -> None:
        if self._open:
            self.paragraphs[-1] += data


def html_paragraphs(text: str) -> list[str]:
    """Text of the <p> elements of a page."""
    parser = _Paragraphs()
    parser.feed(text)
    return parser.paragraphs


def rst_paragraphs(text: str) -> list[str]:
    """Unindented paragraphs of reStructuredText (and plain text), markup resolved to its words."""
    text = re.sub(r":[\w:+.-]+:`~?([^`<]*?)\s*(?:<[^`]*>)?`", r"\1", text)
    text = re.sub(r"`([^`<]+?)\s*<[^`]*>`_+", r"\1", text)
    text = re.sub(r"``?([^`\n]+)``?_*", r"\1", text)
    text = re.sub(r"\*\*?([^*\n]+)\*\*?", r"\1", text).replace("::", ":")
    blocks = re.split(r"\n\s*\n", text)
    return [b for b in blocks if not re.match(r"\s|\.\. |[-*+|=#~^]", b) and not re.search(r"\n[=\-~^*#]{3,}", b)]


# ---------------------------------------------------------------- prose sources: folder -> documents


def from_janeaustenr(folder: Path) -> Iterator[str]:
    """Six novels, kept by R as a serialised vector of lines (strings: flags, length, bytes)."""
    data = next((folder / "r-cran-janeaustenr").rglob("Rdata.rdb")).read_bytes()
    seen: set[int] = set()
    while len(data) > 4:  # chunks: unpacked size in four bytes, then a zlib stream
        stream = zlib.decompressobj()
        yield from _novel(stream.decompress(data[4:]), seen)
        data = stream.unused_data


def _novel(chunk: bytes, seen: set[int]) -> Iterator[str]:
    lines = []
    for match in re.finditer(rb"\x00\x04\x00\x09(....)", chunk, re.DOTALL):
        size = struct.unpack(">I", match[1])[0]
        lines.append(chunk[match.end() : match.end() + size].decode("utf-8", "ignore") if size < 200 else "")
    yield from book("\n".join(lines), seen)


def book(text: str, seen: set[int]) -> Iterator[str]:
    """A public-domain book: its chapters as documents, lines joined to paragraphs."""
    text = text.replace("\r", "").replace("_", "").replace("``", '"').replace("''", '"').replace("--", " - ")
    text = re.sub(r"(^|[\s(])`", r"\1'", text)
    for chapter in re.split(r"\n\s*(?:CHAPTER|Chapter|VOLUME)\b.*\n", text):
        paragraphs = [plain(block) for block in re.split(r"\n\s*\n", chapter)]
        kept = [p for p in paragraphs if len(p) > 20 and p[-1] in ".?!\"':;)-," and hash(p) not in seen]
        seen.update(map(hash, kept))
        yield "\n\n".join(kept)


def from_brotli(folder: Path) -> Iterator[str]:
    """Alice's Adventures in Wonderland."""
    yield from book(read(next((folder / "brotli").rglob("alice29.txt"))), set())


def from_klauspost(folder: Path) -> Iterator[str]:
    """The Adventures of Tom Sawyer."""
    copies = (folder / "golang-github-klauspost-compress-dev").rglob("Mark.Twain-Tom.Sawyer.txt")
    text = read(max(copies, key=lambda path: path.stat().st_size))  # a shorter copy is an excerpt
    yield from book(re.sub(r"(?s)^.*?\*\*\* ?START OF.*?\n|\*\*\* ?END OF.*$", "", text), set())


def from_opticks(folder: Path) -> Iterator[str]:
    """Newton's Opticks."""
    text = read(next((folder / "golang-1.19-src").rglob("Isaac.Newton-Opticks.txt")))
    text = re.sub(r"(?s)^.*?\*\*\* ?START OF.*?\n|\*\*\* ?END OF.*$", "", text)
    paragraphs = list(re.split(r"\n\s*\n", text.replace("_", "").replace("\r", "")))
    yield prose_document([re.sub(r"\[.*?\]", "", p) for p in paragraphs], set())


def from_web(folder: Path) -> Iterator[str]:
    """The World English Bible, one document for each of its books, from SWORD's compressed blocks."""
    for base in sorted((folder / "sword-text-web").rglob("*.bzs")):
        index, blocks = base.read_bytes(), base.with_suffix(".bzz").read_bytes()
        for entry in range(0, len(index), 12):
            offset, packed, _ = struct.unpack("<III", index[entry : entry + 12])
            if not packed:
                continue
            text = zlib.decompress(blocks[offset : offset + packed]).decode("utf-8", "ignore")
            text = re.sub(r"<note.*?</note>|<title.*?</title>", " ", text, flags=re.DOTALL)
            text = re.sub(r"<div[^>]*type=\"x-p\"[^>]*>|<l [^>]*>", "\n\n", text)
            paragraphs = [plain(re.sub(r"<[^>]*>", "", p)) for p in text.split("\n\n")]
            yield "\n\n".join(p for p in paragraphs if len(p) > 30)


def from_wesnoth(folder: Path) -> Iterator[str]:
    """Campaign scenarios: narration as it stands, speeches in quotes with who speaks them."""
    pattern = re.compile(r'speaker=\s*"?([\w\' -]+)|(message|story|description)=\s*_\s*"((?:[^"]|"")*)"')
    verbs = ("said", "answered", "replied", "said", "cried", "said")
    seen: set[int] = set()
    for path in shuffled(p for name in WESNOTH for p in (folder / name).rglob("scenarios/*.cfg")):
        speaker, paragraphs = "narrator", []
        for match in pattern.finditer(read(path)):
            if match[1]:
                speaker = match[1].strip()
                continue
            text = plain(re.sub(r"<[^>]*>", "", match[3].replace('""', "'")))
            if len(text) < 20 or hash(text) in seen or "=" in text:
                continue
            seen.add(hash(text))
            named = speaker[:1].isupper() and speaker not in ("narrator", "unit")
            verb = "asked" if text[-1] == "?" else verbs[len(text) % len(verbs)]
            text = text[:-1] + "," if named and text[-1] == "." else text
            quoted = f'"{text}"' if match[2] == "message" else text
            paragraphs.append(f"{quoted} {verb} {speaker}." if named else quoted)
            speaker = "narrator"
        yield "\n\n".join(paragraphs)


def from_endless_sky(folder: Path) -> Iterator[str]:
    """Conversations of a space-trading game; the player's answers are quoted in it like speech."""
    for path in shuffled((folder / "endless-sky-data").rglob("data/**/*.txt")):
        lines = re.findall(
            r"`\s*([^`]*)`", read(path).replace("<first> <last>", "Captain").replace("<first>", "Captain")
        )
        lines = list(dict.fromkeys(map(plain, lines)))
        yield "\n\n".join(line for line in lines if len(line) > 20 and "<" not in line and line[-1] in '.?!"')


def from_wordnet(folder: Path) -> Iterator[str]:
    """Dictionary entries: a word, its synonyms and the gloss; neighbours in WordNet are related."""
    articles = {"a": "An", "e": "An", "i": "An", "o": "An", "u": "An"}
    for name in ("data.noun", "data.verb", "data.adj"):
        entries = []
        for line in read(next((folder / "wordnet-base").rglob(name))).splitlines():
            if line.startswith(" ") or " | " not in line:
                continue
            head, gloss = line.split(" | ", 1)
            fields = head.split()
            words = [fields[4 + 2 * i].replace("_", " ") for i in range(int(fields[3], 16))]
            gloss = gloss.strip().rstrip(";")
            if name == "data.noun" and words[0].islower() and re.match(r"(an?|the|any|one) ", gloss):
                also = f", or {words[1]}," if len(words) > 1 else ""
                entries.append(f"{articles.get(words[0][0], 'A')} {words[0]}{also} is {gloss}.")
            else:
                entries.append(f"{', '.join(words[:3])}: {gloss}.")
        for start in range(0, len(entries), 24):
            yield "\n".join(entries[start : start + 24])


def from_html(*packages: str, under: str = ""):
    """A reader of the <p> elements of the packages' pages whose path contains ``under``."""

    def documents(folder: Path) -> Iterator[str]:
        seen: set[int] = set()
        for path in shuffled(p for name in packages for p in (folder / name).rglob("*.html*")):
            if under in str(path) and path.is_file():
                yield prose_document(html_paragraphs(read(path)), seen)

    return documents


def from_rst(package: str, under: str = ""):
    """A reader of the prose in a package's reStructuredText whose path matches ``under``."""

    def documents(folder: Path) -> Iterator[str]:
        seen: set[int] = set()
        for path in shuffled((folder / package).rglob("*.rst*")):
            if re.search(under, str(path)) and path.is_file():
                yield prose_document(rst_paragraphs(read(path)), seen)

    return documents


def from_jargon(folder: Path) -> Iterator[str]:
    """The Jargon Lexicon, entry by entry."""
    text = read(next((folder / "dict-jargon").rglob("jargon.dict.dz")))
    seen: set[int] = set()
    entries = re.split(r"\n(?=\S)", text)
    for start in range(0, len(entries), 10):
        blocks = [re.sub(r"[{}]", "", b) for entry in entries[start : start + 10] for b in re.split(r"\n\s*\n", entry)]
        yield prose_document(blocks, seen)


def from_metamath(folder: Path) -> Iterator[str]:
    """What the authors of the proof database say in words about its theorems and sections."""
    seen: set[int] = set()
    for name in ("set.mm", "iset.mm", "nf.mm", "ql.mm"):
        text = read(next((folder / "metamath-databases").rglob(name)))
        comments = re.findall(r"\$\(\s(.*?)\$\)", text, re.DOTALL)
        cleaned = []
        for comment in comments:
            comment = re.sub(r"\((?:Contributed|Revised|Proof shortened|New usage|Proof modif)[^)]*\)", "", comment)
            comment = (
                re.sub(r"~ (\S+)", r"\1", comment.replace("_", " ").replace("`", "")).replace("[", "").replace("]", "")
            )
            cleaned.append(comment)
        for start in range(0, len(cleaned), 30):
            yield prose_document(cleaned[start : start + 30], seen)


def from_docstrings(folder: Path) -> Iterator[str]:
    """Docstrings of the machine-learning packages of the running Python."""
    del folder
    root = Path(sysconfig.get_paths()["purelib"])
    seen: set[int] = set()
    paths = [p for name in ("torch", "transformers", "accelerate") for p in (root / name).rglob("*.py")]
    for path in shuffled(p for p in paths if "/test" not in str(p)):
        try:
            tree = ast.parse(read(path))
        except (SyntaxError, ValueError):
            continue
        kinds = (ast.Module, ast.ClassDef, ast.FunctionDef)
        parameters = re.compile(r"^(Args|Parameters|Returns)|optional, defaults|\w+ \(.{0,40}\): ")
        texts = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
        yield prose_document([p for text in texts for p in rst_paragraphs(text) if not parameters.search(p)], seen)


# ---------------------------------------------------------------- code sources


def code_file(path: Path, comment: str) -> str:
    """A source file without its licence header; empty where it is data or mostly directives."""
    text = read(path).replace("\r", "").replace("\t", "    ")
    lines = [line.rstrip() for line in text.split("\n")]
    while lines and (not lines[0] or lines[0].lstrip().startswith(comment) or lines[0].startswith(("/*", " *", "#!"))):
        lines.pop(0)
    directives = sum(line.startswith("#") for line in lines)
    long_lines = sum(len(line) > MAX_CODE_LINE for line in lines)
    if len(lines) < 20 or long_lines > 3 or (comment == "//" and directives > 0.25 * len(lines)):
        return ""
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(lines))
    return text if sum(character.isascii() for character in text) > 0.99 * len(text) else ""


def from_stdlib(folder: Path) -> Iterator[str]:
    """Modules of the standard library, without tests and tables."""
    del folder
    root = Path(sysconfig.get_paths()["stdlib"])
    skip = re.compile(r"/(tests?|idlelib|encodings|site-packages|lib2to3|pydoc_data|__pycache__|turtledemo)/")
    for path in shuffled(p for p in root.rglob("*.py") if not skip.search(str(p))):
        yield code_file(path, "#")


def from_packages(folder: Path) -> Iterator[str]:
    """Python code of four packages of the running Python and of scikit-learn's examples."""
    root = Path(sysconfig.get_paths()["purelib"])
    names = ("networkx/algorithms", "mpmath", "scipy/optimize", "scipy/stats", "transformers/generation")
    paths = [p for name in names for p in (root / name).rglob("*.py") if "/tests/" not in str(p)]
    paths += (folder / "python-sklearn-doc").rglob("*.py")
    for path in shuffled(paths):
        yield code_file(path, "#")


def from_headers(package: str, under: str):
    """A reader of a package's C++ headers whose path matches ``under``."""

    def documents(folder: Path) -> Iterator[str]:
        paths = [p for p in (folder / package).rglob("*") if p.suffix in (".h", ".hpp", ".ipp") and p.is_file()]
        for path in shuffled(p for p in paths if re.search(under, str(p))):
            yield code_file(path, "//")

    return documents


LINUX_TOPICS = (
    r"/(admin-guide|mm|vm|process|scheduler|filesystems|core-api|locking|RCU|driver-api|networking|timers|block|"
    r"security|virt|trace|power|kernel-hacking|dev-tools|doc-guide|usb|PCI|x86|arch|accounting|bpf)/"
)
BOOST_TOPICS = (
    r"/boost/(algorithm|container|range|graph|geometry|math|unordered|heap|intrusive|asio|multi_array|lockfree|random|"
    r"filesystem|json|numeric|polygon|rational|sort|thread|utility|iterator|circular_buffer|multiprecision|beast|ptr)"
)
READERS = {
    "janeaustenr": from_janeaustenr,
    "brotli": from_brotli,
    "klauspost": from_klauspost,
    "opticks": from_opticks,
    "web": from_web,
    "wesnoth": from_wesnoth,
    "endless_sky": from_endless_sky,
    "wordnet": from_wordnet,
    "linux": from_rst("linux-doc-6.1", LINUX_TOPICS),
    "handbook": from_html("debian-handbook", under="/en-US/"),
    "reference": from_html("debian-reference-en", under=".en."),
    "postgresql": from_html("postgresql-doc-15"),
    "rust": from_html("rust-doc", under="book/"),
    "python_doc": from_rst("python3.11-doc", r"/(library|tutorial|howto|faq|reference|extending|whatsnew)/"),
    "jargon": from_jargon,
    "sklearn": from_html("python-sklearn-doc"),
    "docstrings": from_docstrings,
    "metamath": from_metamath,
    "sage": from_html("sagemath-doc", under="/html/en/"),
    "sympy": from_html("python-sympy-doc"),
    "gap": from_html("gap-doc"),
    "stdlib": from_stdlib,
    "packages": from_packages,
    "boost": from_headers("libboost1.81-dev", BOOST_TOPICS),
    "abseil": from_headers("libabsl-dev", "/absl/"),
    "eigen": from_headers("libeigen3-dev", "/Eigen/"),
}


# ---------------------------------------------------------------- building


def pieces(document: str) -> list[str]:
    """Cut a document at blank lines into pieces of at most about ``PIECE_CHARS``; joined they are the document."""
    parts, current = [], ""
    for block in re.split(r"(?<=\n)\n", document):
        block = block if block.endswith("\n") else block + "\n"
        if current and len(current) + len(block) > PIECE_CHARS:
            parts.append(current)
            current = ""
        current += ("\n" if current or parts else "") + block
    return parts + [current] if current.strip() else parts


def build(folder: Path) -> dict[str, list[tuple[str, list[str]]]]:
    """All documents as category -> [(source, pieces)], each source cut at its limit."""
    corpus: dict[str, list[tuple[str, list[str]]]] = {}
    for category, sources in MIXTURE.items():
        corpus[category] = []
        for source, limit in sources:
            taken = 0
            for document in READERS[source](folder):
                if len(document) < MIN_DOCUMENT_CHARS:
                    continue
                corpus[category].append((source, pieces(document)))
                taken += len(document)
                if taken >= limit:
                    break
            print(f"corpus  {category:12s} {source:12s} {taken:>9,d} characters", flush=True)
    return corpus
