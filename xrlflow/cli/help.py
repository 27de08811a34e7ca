"""The help of a command with its options in groups: arguments and ungrouped options first, then each group."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from xrlflow.options import GROUPS

_FIRST = ("Arguments", "Options")


class GroupedCommand(TyperCommand):
    """A command whose options may have groups (`rich_help_panel`)."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = {title: [] for title in (*_FIRST, *GROUPS)}
        for parameter in self.get_params(ctx):
            if (row := parameter.get_help_record(ctx)) is not None:
                arguments, options = _FIRST
                group = getattr(parameter, "rich_help_panel", None) or options
                groups[arguments if parameter.param_type_name == "argument" else group].append(row)
        for title, rows in groups.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)
