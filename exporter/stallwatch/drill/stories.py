"""The stories that a stand-in can tell, by framework."""

from __future__ import annotations

from collections.abc import Mapping

from .story import Sglang
from .story_vllm import Vllm
from .telling import Story

STORIES: Mapping[str, Story] = {"sglang": Sglang(), "vllm": Vllm()}
