"""Which FX nodes each kernel launch of a compiled graph computes: the data types and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

SCHEMA_VERSION = 1


LaunchId = tuple[str, str]
"""(graph, ``kernel:handle``): a launch among those of several graphs."""


class ProvenanceMissing(RuntimeError):
    """The mapping from kernels to FX nodes is not available: recompile with Inductor's caches off."""


class ProvenanceFormatError(ValueError):
    """A stored provenance record has a missing or malformed field; the message names it."""


@dataclass(frozen=True)
class NodeInfo:
    """One node of Inductor's post-grad FX graph.

    ``shape``, ``stride`` (in elements) and ``dtype`` ("float32") describe the first output and are None
    where the node yields no tensor; symbolic sizes are given by their hint. ``inputs`` are the names of the
    input nodes in order of first use. ``module_path`` is the dotted path of the innermost ``nn.Module``
    ("h.0.attn.c_attn"), "" where there is none or it is the root. ``file``, ``line`` and ``source`` are the
    innermost user frame, ""/0 where none is known. ``flops`` and ``bytes`` (read + written) are modelled
    per call of the node, None where there is no model. ``static`` marks a placeholder or attribute that
    holds a parameter or a constant.
    """

    name: str
    op: str
    target: str
    shape: tuple[int, ...] | None = None
    stride: tuple[int, ...] | None = None
    dtype: str | None = None
    device: str | None = None
    inputs: tuple[str, ...] = ()
    module_path: str = ""
    module_class: str = ""
    file: str = ""
    line: int = 0
    source: str = ""
    pre_grad: tuple[str, ...] = ()
    flops: float | None = None
    bytes: float | None = None
    static: bool = False

    @property
    def location(self) -> tuple[str, str, str, int, str]:
        """Where the user wrote it: (module path, module class, file, line, source text)."""
        return (self.module_path, self.module_class, self.file, self.line, self.source)

    def at(self, location: tuple[str, str, str, int, str]) -> NodeInfo:
        """The same node with another user location."""
        path, cls, file, line, source = location
        return replace(self, module_path=path, module_class=cls, file=file, line=line, source=source)


@dataclass(frozen=True)
class Launch:
    """One kernel call site of the generated wrapper code.

    ``handle`` is Inductor's provenance debug handle, unique per call site. ``extern`` is True for a call
    into a library (``extern_kernels.addmm``, ``torch.ops.aten....default``) and False for a kernel that
    Inductor generated. ``flops`` is the sum over ``nodes``; ``bytes`` counts the inputs from outside the
    group once and the outputs used outside once. Both are modelled, and None where a part of the group has
    no model. ``graph`` is the graph that it belongs to, "" in a provenance, which holds one.
    """

    kernel: str
    handle: int
    nodes: tuple[str, ...]
    extern: bool
    flops: float | None = None
    bytes: float | None = None
    graph: str = ""

    @property
    def key(self) -> str:
        """``kernel:handle``, the name under which profiles and labels refer to this launch."""
        return f"{self.kernel}:{self.handle}"


@dataclass(frozen=True)
class Provenance:
    """The launches of one compiled graph in wrapper order, and the nodes that they compute.

    ``version`` is the version of Inductor's mapping ("2.0": per call site; "1": per kernel name only). ``graph``
    names the compile ("0/0", "2/1 backward") where a profile holds several, and ``cache_key`` is Inductor's key of
    the compiled graph, which stands in the annotation around its calls; both are "" where unknown.
    """

    version: str
    launches: tuple[Launch, ...]
    nodes: dict[str, NodeInfo]
    source_code: str
    graph: str = ""
    cache_key: str = ""

    def launch(self, key: str) -> Launch | None:
        """The launch with this ``kernel:handle`` key, or None."""
        return next((launch for launch in self.launches if launch.key == key), None)

    def to_json(self) -> dict[str, Any]:
        """A JSON-able dict that :meth:`from_json` reads back to an equal object."""
        return {
            "schema_version": SCHEMA_VERSION,
            "version": self.version,
            "launches": [asdict(launch) for launch in self.launches],
            "nodes": [asdict(node) for node in self.nodes.values()],
            "source_code": self.source_code,
            "graph": self.graph,
            "cache_key": self.cache_key,
        }

    @classmethod
    def from_json(cls, data: Any) -> Provenance:
        """Read what :meth:`to_json` wrote. Raises :class:`ProvenanceFormatError`, which names the field."""
        if not isinstance(data, Mapping):
            raise ProvenanceFormatError(f"provenance: expected an object, got {type(data).__name__}")
        version = data.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ProvenanceFormatError(
                f"provenance.schema_version: expected {SCHEMA_VERSION}, got {version!r}; "
                "delete the file to have it re-made"
            )
        launches = [_read(Launch, item, f"provenance.launches[{i}]") for i, item in enumerate(_list(data, "launches"))]
        nodes = [_read(NodeInfo, item, f"provenance.nodes[{i}]") for i, item in enumerate(_list(data, "nodes"))]
        texts = [data.get("version"), data.get("source_code"), data.get("graph", ""), data.get("cache_key", "")]
        for field, value in zip(("version", "source_code", "graph", "cache_key"), texts, strict=True):
            if not isinstance(value, str):
                raise ProvenanceFormatError(f"provenance.{field}: expected a string, got {value!r}")
        version, source, graph, key = (str(text) for text in texts)
        return cls(version, tuple(launches), {node.name: node for node in nodes}, source, graph, key)


def relocate(provenance: Provenance, locations: Mapping[str, tuple[str, str, str, int, str]]) -> Provenance:
    """Replace user locations by those of the graph at hand.

    Inductor's cache key leaves out names of modules, files and lines, so a stored record may have been made
    for another model with the same operators. ``locations`` holds what is known now, by node name. A node
    that is not in it takes the location to which all known nodes that shared its old location have moved,
    and none where that is not unique.
    """
    moved: dict[tuple[str, str, str, int, str], set[tuple[str, str, str, int, str]]] = {}
    for name, location in locations.items():
        if name in provenance.nodes:
            moved.setdefault(provenance.nodes[name].location, set()).add(location)
    nowhere = ("", "", "", 0, "")
    nodes: dict[str, NodeInfo] = {}
    for name, node in provenance.nodes.items():
        if name in locations:
            nodes[name] = node.at(locations[name])
        else:
            targets = moved.get(node.location, set())
            nodes[name] = node.at(next(iter(targets)) if len(targets) == 1 else nowhere)
    return replace(provenance, nodes=nodes)


_TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "int": (int,),
    "bool": (bool,),
    "str | None": (str, type(None)),
    "float | None": (int, float, type(None)),
    "tuple[str, ...]": (list, tuple),
    "tuple[int, ...] | None": (list, tuple, type(None)),
}


def _list(data: Mapping[str, Any], field: str) -> list[Any]:
    value = data.get(field)
    if not isinstance(value, list):
        raise ProvenanceFormatError(f"provenance.{field}: expected a list, got {type(value).__name__}")
    return value


def _read(cls: type[Any], item: Any, where: str) -> Any:
    if not isinstance(item, Mapping):
        raise ProvenanceFormatError(f"{where}: expected an object, got {type(item).__name__}")
    values: dict[str, Any] = {}
    for field in fields(cls):
        if field.name not in item and field.name == "graph":
            continue  # newer than the first records
        if field.name not in item:
            raise ProvenanceFormatError(f"{where}.{field.name}: missing")
        value = item[field.name]
        allowed = _TYPES[str(field.type)]
        if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
            raise ProvenanceFormatError(f"{where}.{field.name}: expected {field.type}, got {value!r}")
        values[field.name] = tuple(value) if isinstance(value, (list, tuple)) else value
    return cls(**values)
