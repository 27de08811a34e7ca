"""Edits: the difference between a graph and its successor."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from xrlflow.ir.graph import FINGERPRINT_MASK, Graph, outputs_fingerprint
from xrlflow.ir.node import Node, mix
from xrlflow.ir.types import ABSENT, Value


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A change of a graph: nodes removed, nodes added, and pairs (old, new) of nodes that read or name other values."""

    rule: str
    removed: tuple[Node, ...]
    added: tuple[Node, ...]
    rewired: tuple[tuple[Node, Node], ...]
    outputs: tuple[Value, ...]


def plan_edit(graph: Graph, rule: str, added: Sequence[Node], aliases: Mapping[Value, Value]) -> Edit:
    """The edit that adds `added` and lets readers of each key of `aliases` read its value instead.

    If an added node has an output of an existing node, it replaces that node (it *adopts* the value). Nodes that lose
    all readers are removed, and so are the nodes that only these read. If only some outputs of a node are replaced, the
    node stays, with new values for these outputs.
    """
    producers, uses = graph.producers, graph.uses
    replaced = {out for node in added for out in node.outputs if out in producers}
    replaced.update(aliases)
    outputs = graph.outputs
    if aliases and not aliases.keys().isdisjoint(outputs):
        outputs = tuple(aliases.get(v, v) for v in outputs)

    gained: dict[Value, int] = {}  # for each value, how many added or rewired nodes begin to read it
    for node in added:
        for value in node.inputs:
            gained[value] = gained.get(value, 0) + 1
    rewired: dict[Value, tuple[Node, Node]] = {}  # old and new node, by the old node's id
    for value, target in aliases.items():
        for user in uses.get(value, ()):
            old, new = rewired.get(user) or (producers[user], producers[user])
            rewired[user] = (old, new.with_inputs(tuple(target if v == value else v for v in new.inputs)))
            gained[target] = gained.get(target, 0) + 1

    removed: dict[Value, Node] = {}

    def is_read(value: Value) -> bool:
        if gained.get(value, 0) > 0 or value in outputs:
            return True
        if value in aliases:  # the readers of this value now read its alias
            return False
        return any(user not in removed for user in uses.get(value, ()))

    # Begin with the producers of replaced values. Go on to producers whose only readers are removed.
    work = list(dict.fromkeys(producers[v].id for v in replaced if v in producers))
    while work:
        node = producers[work.pop()]
        if node.id in removed or any(o not in replaced and is_read(o) for o in node.outputs):
            continue
        removed[node.id] = node
        new_inputs = node.inputs
        if node.id in rewired:
            new_inputs = rewired.pop(node.id)[1].inputs
            for old_value, new_value in set(zip(node.inputs, new_inputs)):
                if old_value != new_value:
                    gained[new_value] -= 1
        for value in (*node.inputs, *new_inputs):
            child = producers.get(value)
            if child is not None and child.id not in removed:
                work.append(child.id)

    _let_go(graph, replaced, removed, rewired)
    return Edit(rule, tuple(removed.values()), tuple(added), tuple(rewired.values()), outputs)


def _let_go(
    graph: Graph,
    replaced: AbstractSet[Value],
    removed: Mapping[Value, Node],
    rewired: dict[Value, tuple[Node, Node]],
) -> None:
    """Give new values to the replaced outputs of nodes that stay because another output of theirs is read."""
    for value in replaced:
        node = graph.producers.get(value)
        if node is None or node.id in removed:
            continue
        old, new = rewired.get(node.id) or (node, node)
        fresh = tuple(mix(o, node.key, 0x6F7270) if o in replaced else o for o in new.outputs)
        if fresh != new.outputs and not any(o in replaced for o in new.outputs if o not in old.outputs):
            rewired[node.id] = (old, new.with_outputs(fresh))


def apply_edit(graph: Graph, edit: Edit) -> tuple[Graph, set[Value]]:
    """The graph after the edit, and the values whose set of readers changed."""
    producers, uses = graph.producers.mutate(), graph.uses.mutate()
    fingerprint = graph.fingerprint
    old_readers: dict[Value, list[Value]] = {}
    new_readers: dict[Value, list[Value]] = {}
    leaving = [*edit.removed, *(old for old, _ in edit.rewired)]
    coming = [*edit.added, *(new for _, new in edit.rewired)]
    for node in leaving:
        fingerprint -= node.fingerprint
        for out in node.outputs:
            del producers[out]
        for value in node.inputs:
            old_readers.setdefault(value, []).append(node.outputs[0])
    for node in coming:
        fingerprint += node.fingerprint
        for out in node.outputs:
            producers[out] = node
        for value in node.inputs:
            new_readers.setdefault(value, []).append(node.outputs[0])
    changed: set[Value] = set()
    for value in old_readers.keys() | new_readers.keys():
        if value == ABSENT:
            continue
        before = uses.get(value, ())
        lost_readers = old_readers.get(value, ())
        after = {u for u in before if u not in lost_readers} if lost_readers else set(before)
        after.update(new_readers.get(value, ()))
        if len(after) == len(before) and all(u in after for u in before):
            continue
        changed.add(value)
        if after:
            uses[value] = tuple(sorted(after))
        else:
            del uses[value]
    if edit.outputs != graph.outputs:
        changed.update(set(graph.outputs) ^ set(edit.outputs))
        fingerprint += outputs_fingerprint(edit.outputs) - outputs_fingerprint(graph.outputs)
    successor = Graph(
        producers.finish(),
        uses.finish(),
        graph.inputs,
        edit.outputs,
        graph.leaves,
        fingerprint & FINGERPRINT_MASK,
        graph.node_count + len(edit.added) - len(edit.removed),
    )
    return successor, changed
