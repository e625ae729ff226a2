"""A query's vector -> the nearest items: one Faiss index, new items beside it, removed ones left out."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import faiss
import numpy as np

from feature_repo.queries import Query
from feature_repo.schema import tower_inputs

log = logging.getLogger(__name__)
_faiss: Any = faiss  # its stubs know neither keyword parameters nor arrays where C++ takes pointers
# A corrupt index may claim huge arrays and long loops. Those of a valid one have at most twice as many bytes
# or turns as the file has bytes; those of a small one may have this many.
FAISS_LEAST = 16 << 20
GPU_MOST_K = 2_048  # neighbours that GPU Faiss finds at once
HARDER = 4  # times as much is searched when too few items came


@dataclass(frozen=True, eq=False)
class Search:
    """How to search: how much of the index to look at, and which items may be returned.

    `parameters` are those of Faiss: `nprobe` (lists of an inverted file), `k_factor` (times k vectors that
    are compared again, more exactly), `efSearch` (nodes of a graph). Missing ones are those of the index.
    """

    parameters: Mapping[str, int] = field(default_factory=dict)
    allowed: np.ndarray | None = None  # (items,) bool; None: all of them


PLAIN = Search()
_NOTHING = np.empty(0, np.int64)


@dataclass(frozen=True)
class _Selection:
    """The rows of the main index that a search may return."""

    selector: Any  # faiss.IDSelector; None: every row
    parameters: Any  # faiss.SearchParameters; None: the index's own
    count: int  # rows of the main index that may be found


class ItemIndex:
    """Searches a main Faiss index of any type, and a small exact one beside it for items added later.

    Nothing changes after it was opened. The pipeline builds the next main index from the remaining items.
    """

    def __init__(
        self, main: Any, added: tuple[np.ndarray, np.ndarray] | None = None, removed: np.ndarray = _NOTHING
    ) -> None:
        """Take an inner-product index whose row numbers are item codes.

        Args:
            main: the index.
            added: (m,) distinct codes of items beside it, and their vectors of the item tower,
                (m, dimension); an item of the index gets the new vector.
            removed: (r,) codes of items, the added ones too, that no search returns.

        Raises:
            ValueError: its type cannot be searched by this class, or the vectors or codes do not fit to it.
        """
        self._main = main
        self._own = _own_parameters(main)
        if main.metric_type != faiss.METRIC_INNER_PRODUCT:  # for which the two towers were trained
            raise ValueError("the index measures distance, expected inner product: build the index again")
        codes, vectors = _NOTHING, np.empty((0, self.dimension), np.float32)
        if added is not None:
            codes, vectors = np.asarray(added[0], np.int64), np.asarray(added[1], np.float32)
            if vectors.shape != (len(codes), self.dimension) or not np.isfinite(vectors).all():
                expected = f"{len(codes)} of {self.dimension} finite numbers"
                raise ValueError(f"vectors of shape {vectors.shape}: expected {expected}")
        removed, items = np.asarray(removed, np.int64), max(self.rows, codes.max(initial=-1) + 1)
        # Compiled loops write where these codes point.
        if removed.min(initial=0) < 0 or removed.max(initial=-1) >= items:
            raise ValueError(
                f"removed codes from {removed.min()} to {removed.max()}: expected from 0 to {items - 1}"
            )
        stays = ~np.isin(codes, removed)
        self._codes, self._vectors = codes[stays], vectors[stays]  # the items beside the main index
        hidden = np.concatenate([codes, removed])
        self._hidden = hidden[hidden < self.rows]  # rows of the main index that no search returns
        # A selector of millions of items takes long to make: one for each search.
        self._selections: dict[Search, _Selection] = {}
        self._twin = _gpu_twin(main)  # its resources must live as long
        self._one_at_a_time = threading.Lock()  # on the GPU: its scratch memory is shared

    @property
    def rows(self) -> int:
        """The number of vectors in the main index, those of removed items included."""
        return int(self._main.ntotal)

    @property
    def dimension(self) -> int:
        """The number of columns of a vector."""
        return int(self._main.d)

    def search(self, vectors: np.ndarray, k: int, search: Search = PLAIN) -> tuple[np.ndarray, np.ndarray]:
        """Return the k best items of each query.

        Faiss skips removed items and those that are not allowed, so that others take their places. If it
        looked at too few lists or nodes to find k items, it looks at more.

        Args:
            vectors: (q, dimension) float32.
            k: items of each query.
            search: how much to look at, and which items may be returned.

        Returns:
            Scores, (q, k) float32, and codes, (q, k) int64, best first; the codes that are missing are -1.

        Raises:
            ValueError: a parameter that this type of index does not have.
        """
        selection = self._selections.get(search)
        if selection is None:
            selection = self._selections[search] = self._select(search)
        scores, codes = self._search_main(vectors, k, search, selection)
        codes = np.where(codes < self.rows, codes, -1)
        if not len(self._codes):
            return scores, codes
        return self._with_others(scores, codes, vectors, search.allowed)

    def _select(self, search: Search) -> _Selection:
        if unknown := set(search.parameters) - set(self._own):
            raise ValueError(
                f"an index of type {type(self._main).__name__} has no search parameter {min(unknown)!r}: "
                f"it has {', '.join(self._own) or 'none'}"
            )
        if search.allowed is None and not len(self._hidden):
            return _Selection(None, _parameters(self._own | dict(search.parameters), None), self.rows)
        may = np.ones(self.rows, bool)
        if search.allowed is not None:
            may[:] = False
            may[: len(search.allowed)] = search.allowed[: self.rows]
        may[self._hidden] = False
        selector = _faiss.IDSelectorBitmap(np.packbits(may, bitorder="little"))
        parameters = _parameters(self._own | dict(search.parameters), selector)
        return _Selection(selector, parameters, int(may.sum()))

    def _search_main(
        self, vectors: np.ndarray, k: int, search: Search, selection: _Selection
    ) -> tuple[np.ndarray, np.ndarray]:
        # GPU Faiss has no selectors: a search with one runs on the CPU.
        on_gpu = self._twin is not None and selection.selector is None and k <= GPU_MOST_K
        look = self._search_twin if on_gpu else self._main.search
        scores, codes = look(vectors, k, params=selection.parameters)
        wanted, given = min(k, selection.count), self._own | dict(search.parameters)
        short = codes[:, max(wanted, 1) - 1] < 0
        while wanted and short.any() and (more := self._harder(given)) != given:
            given = more
            scores[short], codes[short] = look(
                vectors[short], k, params=_parameters(given, selection.selector)
            )
            short = codes[:, wanted - 1] < 0
        return scores, codes

    def _with_others(
        self, scores: np.ndarray, codes: np.ndarray, vectors: np.ndarray, allowed: np.ndarray | None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the best of the main index's items and of those beside it."""
        may = np.ones(len(self._codes), bool)
        if allowed is not None:
            may = self._codes < len(allowed)
            may[may] = allowed[self._codes[may]]
        others = self._codes[may]
        k = scores.shape[1]
        scores = np.concatenate([scores, vectors @ self._vectors[may].T], axis=1)
        codes = np.concatenate([codes, np.broadcast_to(others, (len(codes), len(others)))], axis=1)
        best = np.argsort(np.where(codes < 0, np.inf, -scores), axis=1, kind="stable")[:, :k]
        return np.take_along_axis(scores, best, axis=1), np.take_along_axis(codes, best, axis=1)

    def _search_twin(self, vectors: np.ndarray, k: int, params: Any) -> tuple[np.ndarray, np.ndarray]:
        with self._one_at_a_time:
            if self._twin is not None:
                try:
                    return self._twin[0].search(vectors, k, params=params)
                except RuntimeError as error:
                    log.error("the index on the GPU fails, that on the CPU answers from now on: %s", error)
                    # Kept: to free the memory of a GPU that fails may end the process.
                    self._failed, self._twin = self._twin, None
        return self._main.search(vectors, k, params=params)

    def _harder(self, given: dict[str, int]) -> dict[str, int]:
        """Return parameters that look at more; the same ones if the whole index was looked at."""
        most = {"efSearch": self.rows, "nprobe": _inverted(self._main).nlist if "nprobe" in given else 0}
        return given | {n: min(v * HARDER, most[n]) for n, v in given.items() if most.get(n, 0) > v}


def read_item_index(
    file: Path, added: tuple[np.ndarray, np.ndarray] | None = None, removed: np.ndarray = _NOTHING
) -> ItemIndex:
    """Return the index of a file, mapped into memory: processes that read the same file share its pages.

    Raises:
        RuntimeError: the file is no index, or claims more than it holds.
        ValueError: as `ItemIndex`.
    """
    faiss.omp_set_num_threads(1)  # a second thread costs more to wake than a search takes
    read_faiss(file)  # reports a truncated file; the reader below would crash
    return ItemIndex(read_faiss(file, faiss.IO_FLAG_MMAP_IFC), added, removed)


def read_faiss(file: Path, flags: int = 0) -> faiss.Index:
    """Return Faiss's index of a file, read with its flags.

    Raises:
        RuntimeError: the file is no index, or claims more than it holds.
    """
    most = max(2 * file.stat().st_size, FAISS_LEAST)
    faiss.set_deserialization_vector_byte_limit(most)
    faiss.set_deserialization_loop_limit(most)
    # The table of a product quantizer serves distances, not inner products; it may be larger than the file.
    return faiss.read_index(str(file), flags | faiss.IO_FLAG_SKIP_PRECOMPUTE_TABLE)


class FaissTower:
    """The query tower (ONNX) in front of an item index, with one way to search."""

    def __init__(self, session: Any, index: ItemIndex, search: Search = PLAIN) -> None:
        self._session = session
        self._index = index
        self._search = search

    def check(self) -> None:
        """Search for one item with an empty query.

        Raises:
            ValueError: a parameter that this type of index does not have.
        """
        self._index.search(np.zeros((1, self._index.dimension), np.float32), 1, self._search)

    def vector(self, query: Query) -> np.ndarray:
        """Return the vector of a query, (1, dimension) float32."""
        vector: np.ndarray = self._session.run(["vector"], tower_inputs(query))[0]
        return vector

    def search(self, query: Query, k: int) -> np.ndarray:
        """Return the codes of up to k items, nearest first; no codes for an empty query.

        Without history or basket the tower knows only item bias; popularity is a better prior.
        """
        if not k or not query.says_something:  # Faiss refuses k = 0
            return _NOTHING
        codes = self._index.search(self.vector(query), k, self._search)[1][0]
        return codes[codes >= 0]


def _own_parameters(index: Any) -> dict[str, int]:
    """Return the search parameters that an index was stored with, by name."""
    if isinstance(index, faiss.IndexRefine):
        base = _own_parameters(faiss.downcast_index(index.base_index))
        if "nprobe" in base:
            return {**base, "k_factor": int(index.k_factor)}
    if isinstance(index, faiss.IndexIVF):
        return {"nprobe": int(index.nprobe)}
    if isinstance(index, faiss.IndexHNSW):
        return {"efSearch": int(index.hnsw.efSearch)}
    if isinstance(index, faiss.IndexFlat):
        return {}
    raise ValueError(
        f"an index of type {type(index).__name__}: expected Flat, IVF, IVF with refinement, or HNSW"
    )


def _parameters(given: Mapping[str, int], selector: Any) -> Any:
    chosen = {} if selector is None else {"sel": selector}
    if "nprobe" in given:
        lists = _faiss.SearchParametersIVF(nprobe=given["nprobe"], **chosen)
        if "k_factor" not in given:
            return lists
        return _faiss.IndexRefineSearchParameters(k_factor=given["k_factor"], base_index_params=lists)
    if "efSearch" in given:
        return _faiss.SearchParametersHNSW(efSearch=given["efSearch"], **chosen)
    return _faiss.SearchParameters(**chosen) if chosen else None


def _inverted(index: Any) -> Any:
    return faiss.downcast_index(index.base_index) if isinstance(index, faiss.IndexRefine) else index


def _gpu_twin(index: Any) -> tuple[Any, Any] | None:
    """Return a copy on the GPU and its resources; None without a GPU, or if GPU Faiss lacks the type."""
    on_gpu = (faiss.IndexFlat, faiss.IndexIVFFlat, faiss.IndexIVFScalarQuantizer, faiss.IndexIVFPQ)
    # CPU builds of Faiss have the function as well; it returns 0.
    if not isinstance(index, on_gpu) or faiss.get_num_gpus() == 0:
        return None
    resources = faiss.StandardGpuResources()
    return faiss.index_cpu_to_gpu(resources, 0, index), resources
