"""Faults in every layer, each a line as somebody might get it wrong; tests must find all of them.

Those of the protocol and of what guards pages stand in `tests/simulation/planted.py`: what finds them is a schedule.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PlantedFault:
    """A change of one place in the code.

    Attributes:
        name: what is wrong then.
        file: below `src/kvferry`.
        right: what stands there, once in the file.
        wrong: what takes its place.
        nearest: tests that should find it: tried first, since all others take minutes.
    """

    name: str
    file: str
    right: str
    wrong: str
    nearest: str

    @property
    def layer(self) -> str:
        return self.file.partition("/")[0]


CATALOGUE = (
    # ---- layout
    PlantedFault(
        "intervals that touch overlap",
        "layout/interval.py",
        "return Interval(start, stop) if start < stop else None",
        "return Interval(start, stop) if start <= stop else None",
        "tests/unit/layout",
    ),
    PlantedFault(
        "a pipeline stage has the first layer of the next",
        "layout/sharding.py",
        "bisect_left(self.layers, stage.stop))",
        "bisect_left(self.layers, stage.stop + 1))",
        "tests/unit/layout",
    ),
    PlantedFault(
        "the rest of a request that is no multiple of the parts is lost",
        "layout/tokens.py",
        "BlockLength(max(1, -(-request_tokens // blocks)))",
        "BlockLength(max(1, request_tokens // blocks))",
        "tests/unit/layout",
    ),
    PlantedFault(
        "a range of tokens that goes on behind the request",
        "layout/tokens.py",
        "np.minimum(stops, high)",
        "np.minimum(stops, high + 1)",
        "tests/unit/plan/test_routes.py",
    ),
    PlantedFault(
        "the last parts get the page more of whole pages that do not divide evenly",
        "layout/tokens.py",
        "return BlockLength(pages * self.page_tokens, longer, self.page_tokens)",
        "return BlockLength((pages + (longer > 0)) * self.page_tokens, blocks - longer, -self.page_tokens)",
        "tests/unit/layout/test_tokens.py",
    ),
    PlantedFault(
        "a rank's own blocks are counted as if all of them were longer",
        "layout/tokens.py",
        "longer=int(np.searchsorted(self._owned(), block.longer))",
        "longer=min(block.longer, len(self._owned()))",
        "tests/unit/layout/test_tokens.py",
    ),
    # ---- plan
    PlantedFault(
        "runs that are contiguous on one side alone are merged",
        "plan/lowering.py",
        "if not remaining and loop.source_stride == loop.destination_stride == length:",
        "if not remaining and loop.source_stride == length:",
        "tests/unit/plan/test_lowering.py",
    ),
    PlantedFault(
        "pages of two sizes move in units of the source's page",
        "plan/routes.py",
        "unit = gcd(source.page_tokens, destination.page_tokens)",
        "unit = source.page_tokens",
        "tests/unit/plan/test_pair.py",
    ),
    PlantedFault(
        "a rank that holds other tokens than its layout says goes on",
        "plan/compatibility.py",
        "if share_tokens != expected:",
        "if share_tokens > tokens:",
        "tests/unit/endpoint/test_layouts.py",
    ),
    PlantedFault(
        "the cached prefix is overwritten up to its unit's start",
        "plan/routes.py",
        "return max(low // unit * unit, min(held, low)), -(-high // unit) * unit",
        "return low // unit * unit, -(-high // unit) * unit",
        "tests/unit/plan/test_routes.py",
    ),
    PlantedFault(
        "the last block of merged descriptors is dropped",
        "plan/descriptors.py",
        "starts = np.arange(0, len(order), most)[::-1]",
        "starts = np.arange(0, len(order) - most + 1, most)[::-1]",
        "tests/unit/plan/test_descriptors.py",
    ),
    PlantedFault(
        "staging is reckoned as if its steps never overlapped",
        "plan/cost.py",
        "(gather + write + scatter,) if costs.is_one_memory else (gather, write, scatter)",
        "(gather + write + scatter,)",
        "tests/unit/plan/test_cost.py",
    ),
    PlantedFault(
        "a run of more pages than were counted is written out",
        "plan/requests/page_numbers.py",
        "counts.max() > self.count or counts.sum() != self.count",
        "counts.sum() < self.count",
        "tests/unit/plan/test_page_numbers.py",
    ),
    PlantedFault(
        "a run of pages may reach behind the pool",
        "plan/requests/page_numbers.py",
        "firsts > pool_pages - counts",
        "firsts >= pool_pages",
        "tests/unit/plan/test_page_numbers.py",
    ),
    # ---- staging
    PlantedFault(
        "long runs are gathered into the place of the run before",
        "staging/host.py",
        "(array_at(address + number * shape.length, (shape.length,)",
        "(array_at(address + max(0, number - 1) * shape.length, (shape.length,)",
        "tests/unit/staging/test_host_kernels.py",
    ),
    PlantedFault(
        "no bytes of staging memory can be asked for",
        "staging/memory.py",
        "if num_bytes < 1:",
        "if num_bytes < 0:",
        "tests/unit/staging/test_memory.py",
    ),
    PlantedFault(
        "a part whose bytes are not those of its segments is scattered",
        "staging/scattering.py",
        "if ends != span.num_bytes:",
        "if ends > span.num_bytes:",
        "tests/property/test_staged_equals_direct.py",
    ),
    PlantedFault(
        "segments are packed without alignment",
        "staging/scattering.py",
        "        offset = aligned(offset)\n        yield blocks",
        "        yield blocks",
        "tests/property/test_staged_equals_direct.py",
    ),
    PlantedFault(
        "a part without digests passes",
        "staging/digests.py",
        "    if segment.digests is None:\n        raise ChecksumError(",
        "    if segment.digests is None:\n        return\n        raise ChecksumError(",
        "tests/unit/endpoint/test_checksums.py",
    ),
    # ---- control
    PlantedFault(
        "a process number in use again counts as the process that had it",
        "control/process_identity.py",
        "return self.has_ended or self.started != process.started",
        "return self.has_ended",
        "tests/unit/control/test_process_identity.py",
    ),
    PlantedFault(
        "a process that is hidden counts as gone",
        "control/process_identity.py",
        "if self.started is None or not process.started:\n            return False",
        "if self.started is None or not process.started:\n            return True",
        "tests/unit/control/test_process_identity.py",
    ),
    # ---- endpoint
    PlantedFault(
        "without a proof in reach bytes go directly",
        "endpoint/prefill/paths.py",
        "if forced is None and message.staging.unproven:",
        "if forced is None and False:",
        "tests/unit/endpoint/test_ends.py",
    ),
    PlantedFault(
        "a missing pod proves its end",
        "protocol/links/pods.py",
        'if node_name is None:\n        return ""',
        'if node_name is None:\n        return "" if found is not None else "it is not there"',
        "tests/unit/protocol/test_pods.py",
    ),
    PlantedFault(
        "a deadline that moved is forgotten when its first time has come",
        "endpoint/runtime/timers.py",
        "                if timer.due_at > now:\n                    self._put(timer)\n",
        "                if timer.due_at > now:\n                    pass\n",
        "tests/unit/endpoint/test_timers.py",
    ),
    PlantedFault(
        "a worker that stops forgets the writes that it started",
        "endpoint/runtime/workers.py",
        "if self._is_stopping and not self._has_writes:",
        "if self._is_stopping:",
        "tests/unit/endpoint/test_closing.py tests/unit/endpoint/test_faults.py",
    ),
    PlantedFault(
        "a write that ends before an older one to the same peer is not found",
        "endpoint/runtime/writes.py",
        "            self._look_around(max(MOST_POLLS // 2, -(-before // LOOKS_AROUND) if has_time else 0))\n",
        "",
        "tests/unit/endpoint/test_writes.py",
    ),
    PlantedFault(
        "rooms go on that a lost decode rank had opened",
        "protocol/rooms/room_table.py",
        "return [self.rooms[room] for room, receivers in self._given.items() if receiver in receivers], aborts",
        "return [], aborts",
        "tests/unit/endpoint/test_costs.py tests/unit/endpoint/test_links.py",
    ),
    PlantedFault(
        "an abort of what was dropped with a lost rank is taken for that of a room that has ended",
        "protocol/rooms/room_table.py",
        "return self._dropped.get((receiver, message.room)) == message.generation",
        "return False",
        "tests/unit/protocol/test_room_table.py tests/unit/endpoint/test_links.py",
    ),
    PlantedFault(
        "what came while a message was sent is not found",
        "control/ends.py",
        "            self._on_sent(self)\n",
        "            pass\n",
        "tests/unit/control/test_channel.py",
    ),
    PlantedFault(
        "who connects anew does not wait for what a failed write had sent",
        "endpoint/decode/quarantine.py",
        "return is_over and message.last_failure <= number",
        "return True",
        "tests/unit/endpoint/test_faults.py",
    ),
    PlantedFault(
        "who connects anew waits for what it has waited for",
        "endpoint/decode/quarantine.py",
        "return is_over and message.last_failure <= number",
        "return message.last_failure == 0",
        "tests/unit/endpoint/test_faults.py",
    ),
    PlantedFault(
        "a write that fails while two ranks measure is forgotten",
        "endpoint/prefill/attachment.py",
        "            broken_off()\n",
        "            pass\n",
        "tests/unit/endpoint/test_faults.py",
    ),
    PlantedFault(
        "pages in quarantine are not shown",
        "endpoint/decode/room.py",
        "(ReceiverState.QUARANTINED, ReceiverState.SETTLING)",
        "(ReceiverState.SUCCEEDED, ReceiverState.SETTLING)",
        "tests/unit/endpoint/test_observed.py",
    ),
    # ---- engines
    PlantedFault(
        "vLLM's window starts a block late",
        "engines/vllm/scheduling.py",
        "return first // group.table_tokens, -(-tokens // group.table_tokens)",
        "return -(-first // group.table_tokens), -(-tokens // group.table_tokens)",
        "tests/unit/engines/test_vllm_scheduling.py",
    ),
    PlantedFault(
        "a number of vLLM's block table stands for one rank's tokens alone",
        "engines/vllm/layouts.py",
        "return self.block_tokens * self.token_ranks",
        "return self.block_tokens",
        "tests/unit/engines/test_vllm_shares.py",
    ),
    PlantedFault(
        "vLLM's ranks take single tokens in turns, whatever is configured",
        "engines/vllm/shares.py",
        "interleaved(decode_context.size, interleave)",
        "interleaved(decode_context.size, 1)",
        "tests/unit/engines/test_vllm_shares.py",
    ),
    PlantedFault(
        "a rank of vLLM's names pages for all tokens where it keeps a share",
        "engines/vllm/worker.py",
        "if self._layout_groups[group].has_slots:",
        "if True:",
        "tests/unit/engines/test_vllm_shares.py",
    ),
    PlantedFault(
        "vLLM's tensor-parallel ranks share tokens before those of prefill context parallelism",
        "engines/vllm/shares.py",
        "number = tensor.rank * prefill_context.size + prefill_context.rank",
        "number = prefill_context.rank * tensor.size + tensor.rank",
        "tests/unit/engines/test_vllm_shares.py",
    ),
    PlantedFault(
        "a preempted request's blocks are not sent again from the first",
        "engines/vllm/scheduling.py",
        "                sending.next_blocks.clear()\n",
        "",
        "tests/unit/engines/test_vllm_scheduling.py",
    ),
    PlantedFault(
        "vLLM: choices copy blocks that have been given to others",
        "engines/vllm/scheduling.py",
        "self._pool.touch(kept)",
        "kept.clear()",
        "tests/unit/engines/test_vllm_scheduling.py",
    ),
    PlantedFault(
        "vLLM: choices copy from one that has lost its cache",
        "engines/vllm/scheduling.py",
        "or first.num_computed_tokens < there:",
        "or first.num_computed_tokens < 0:",
        "tests/unit/engines/test_vllm_scheduling.py",
    ),
    PlantedFault(
        "vLLM: what drafting modules cache of drafts is sent",
        "engines/vllm/scheduling.py",
        "held_back = 0 if _is_shortened(request) else self._held_back_tokens",
        "held_back = 0 if _is_shortened(request) else 1",
        "tests/unit/engines/test_vllm_scheduling.py",
    ),
    PlantedFault(
        "vLLM: a prompt with recurrent state is computed to its end",
        "engines/vllm/scheduling.py",
        "request.num_prompt_tokens -= count",
        "request.num_prompt_tokens -= 0",
        "tests/unit/engines/test_vllm_scheduling.py",
    ),
    PlantedFault(
        "vLLM: recurrent state is sent from the first block",
        "engines/vllm/scheduling.py",
        "return max(0, stop - 1), stop",
        "return 0, min(1, stop)",
        "tests/unit/engines/test_vllm_scheduling.py",
    ),
    PlantedFault(
        "vLLM: ranks divide what every one of them has of a convolution",
        "engines/vllm/states.py",
        "b = c = Part(width, Interval(0, width))",
        "pass",
        "tests/unit/engines/test_vllm_states.py",
    ),
    PlantedFault(
        "vLLM: of a block that kernels divide only a page is copied",
        "engines/vllm/copies.py",
        "each[:, np.newaxis] * self.pages_per_block + ratio",
        "each[:, np.newaxis] * self.pages_per_block + ratio[:1]",
        "tests/unit/engines/test_vllm_copies.py",
    ),
    PlantedFault(
        "vLLM: what a changed vLLM lacks is not looked at",
        "engines/vllm/__init__.py",
        "contract.check()",
        "contract.version()",
        "tests/unit/engines/test_vllm_contract.py",
    ),
    PlantedFault(
        "pages leave before the device has filled them",
        "engines/vllm/outgoing.py",
        "if not (batch.is_computed and follows):",
        "if not follows:",
        "tests/unit/engines/test_vllm_outgoing.py",
    ),
    PlantedFault(
        "vLLM gets blocks back that it uses itself",
        "engines/vllm/outgoing.py",
        "known is not None and known.is_kept and known.sender.pages_reusable",
        "known is not None and known.sender.pages_reusable",
        "tests/unit/engines/test_vllm_outgoing.py",
    ),
    PlantedFault(
        "layers of two block tables are one run",
        "engines/vllm/layouts.py",
        "if high.number != low.number + 1 or high.group is not low.group or high.heads != low.heads:",
        "if high.number != low.number + 1 or high.heads != low.heads:",
        "tests/unit/engines/test_vllm_layouts.py",
    ),
    PlantedFault(
        "the KV heads of ranks that share one lie on every other rank",
        "engines/vllm/heads.py",
        "first = coordinates.tp_rank // replicas * own",
        "first = coordinates.tp_rank * own % total",
        "tests/unit/engines tests/property/test_described_engines.py",
    ),
    PlantedFault(
        "objects that contradict each other on KV heads are believed",
        "engines/vllm/heads.py",
        "if one.total != other.total or (is_held_by_both and one.held != other.held):",
        "if False:",
        "tests/unit/engines",
    ),
    PlantedFault(
        "another layer's projection says how KV heads are divided",
        "engines/vllm/heads.py",
        "return any(id(each) in self._attention and each is not layer for each in parent.modules())",
        "return False",
        "tests/unit/engines",
    ),
    PlantedFault(
        "KV heads that nobody knows are the same on every rank",
        "engines/vllm/layouts.py",
        "held[SHARE] = Interval(coordinates.tp_rank, coordinates.tp_rank + 1)",
        "held[SHARE] = Interval(0, 1)",
        "tests/unit/engines tests/property/test_described_engines.py",
    ),
    PlantedFault(
        "layers of several numbers of KV heads are one component",
        "engines/vllm/layouts.py",
        "form = layer.heads_in_words, layer.content, layer.view.dtype",
        'form = "heads", layer.content, layer.view.dtype',
        "tests/unit/engines tests/property/test_described_engines.py",
    ),
    PlantedFault(
        "a kind of cache that is refused is transferred",
        "engines/cache_kinds.py",
        "if kind is not None and kind.refusal is None:",
        "if kind is not None:",
        "tests/unit/engines",
    ),
    PlantedFault(
        "SGLang's values are described as its keys",
        "engines/sglang/layouts.py",
        'yield "v", pool.buffers[half:], ',
        'yield "v", pool.buffers[:half], ',
        "tests/unit/engines/test_sglang_layouts.py",
    ),
    PlantedFault(
        "SGLang's recurrent channels all start at the first rank's",
        "engines/sglang/layouts.py",
        "return Interval(units.start * width, units.stop * width)",
        "return Interval(0, len(units) * width)",
        "tests/unit/engines/test_sglang_layouts.py",
    ),
    PlantedFault(
        "A layer behind one without an index of its own has that one's place",
        "engines/sglang/layouts.py",
        "first = mine.start + given.layers[start]",
        "first = mine.start + start",
        "tests/unit/engines/test_sglang_companions.py",
    ),
    PlantedFault(
        "SGLang's windows are as long as the model's configuration says",
        "engines/sglang/pools.py",
        "window_tokens=pools.window_tokens if window",
        "window_tokens=model.sliding_window_size if window",
        "tests/unit/engines/test_sglang_pools.py",
    ),
    PlantedFault(
        "SGLang's windows have the heads of its other layers",
        "engines/sglang/pools.py",
        "((main, full), (windowed, windows))",
        "((main, full), (windowed, full))",
        "tests/property/test_described_sglang.py",
    ),
    PlantedFault(
        "SGLang's layers in one pool have the number of the configuration",
        "engines/sglang/pools.py",
        "full if not full or full == windows else None",
        "full",
        "tests/property/test_described_sglang.py",
    ),
    PlantedFault(
        "SGLang's heads count without its pool",
        "engines/sglang/pools.py",
        "return claimed if held == claimed // place.tp_size else None",
        "return claimed",
        "tests/unit/engines",
    ),
    PlantedFault(
        "what SGLang does not describe is the same on every rank",
        "engines/sglang/layouts.py",
        "return Interval(self._tp_rank, self._tp_rank + 1)",
        "return Interval(0, 1)",
        "tests/property/test_described_sglang.py",
    ),
    PlantedFault(
        "B and C of SGLang's convolutions are cut by heads",
        "engines/sglang/pools.py",
        "b_and_c = Block(per_group, count)",
        "b_and_c = Block(per_group, per_group)",
        "tests/property/test_described_sglang.py tests/unit/engines",
    ),
    PlantedFault(
        "an engine's changed signature is not noticed",
        "engines/contract.py",
        "        if found == self.parameters:",
        "        if True:",
        "tests/unit/engines/test_contract.py",
    ),
    PlantedFault(
        "a hook that SGLang has lost counts as applied",
        "engines/sglang/hooks.py",
        "return any(self.change in _enclosed(function) for function in _wrapped(found))",
        "return True",
        "tests/unit/engines/test_sglang_hooks.py",
    ),
    PlantedFault(
        "SGLang goes on with nixl where our plug-in fails",
        "engines/sglang/plugin.py",
        "raise SystemExit(_refusal(error)) from error",
        "raise",
        "tests/unit/engines/test_sglang_hooks.py",
    ),
    PlantedFault(
        "SGLang's salt is no condition of a request",
        "engines/sglang/conditions.py",
        "salt=_salt(req)",
        'salt=""',
        "tests/unit/engines/test_sglang_identity.py",
    ),
    PlantedFault(
        "an image of SGLang's counts as its prompt",
        "engines/sglang/conditions.py",
        "tokens[each.offset : each.offset + each.length] = _OF_AN_INPUT",
        "pass",
        "tests/unit/engines/test_sglang_identity.py",
    ),
    PlantedFault(
        "prefill ranks that send nothing do not know the prefix",
        "endpoint/decode/rooms.py",
        "held=max((group.held for group in room.groups), default=0)",
        "held=0",
        "tests/unit/endpoint/test_exchange.py",
    ),
    PlantedFault(
        "a field that one side does not say is not compared",
        "plan/fingerprint.py",
        "return prefill.get(name) != decode.get(name)",
        "return is_said_by_both and prefill.get(name) != decode.get(name)",
        "tests/unit/plan/test_fingerprint.py tests/unit/endpoint/test_same_caches.py",
    ),
    PlantedFault(
        "servers connect without a look at their fingerprints",
        "plan/fingerprint.py",
        "    if refused:\n",
        "    if refused and not may_differ:\n",
        "tests/unit/plan/test_fingerprint.py tests/unit/endpoint/test_same_caches.py",
    ),
    PlantedFault(
        "vLLM: K of all heads and then V counts as K and V of every head",
        "engines/vllm/identity.py",
        "    if slots is None and content is None:\n",
        "    if content is None or slots == 2:\n",
        "tests/unit/engines/test_vllm_identity.py",
    ),
    PlantedFault(
        "vLLM: fp8 of two kinds is one",
        "engines/vllm/identity.py",
        '"fp8_e5m2": "float8_e5m2"}',
        '"fp8_e5m2": fp8_dtype}',
        "tests/unit/engines",
    ),
    PlantedFault(
        "vLLM's scheduler waits for an adapter's files",
        "engines/vllm/identity.py",
        "return lora is None or self._adapter(lora).done()",
        "return lora is None or bool(self._adapter(lora).result())",
        "tests/unit/engines/test_vllm_identity.py",
    ),
    PlantedFault(
        "MultiConnector's requests end without their blocks being kept",
        "engines/vllm/connector.py",
        "return self.request_finished_all_groups(request, (block_ids,))",
        "return False, None",
        "tests/unit/engines/test_vllm_connector.py",
    ),
    PlantedFault(
        "vLLM serves with HiSparse",
        "engines/vllm/guards.py",
        "if vllm_config.attention_config.hisparse_config is not None:",
        "if False:",
        "tests/unit/engines/test_vllm_guards.py",
    ),
    PlantedFault(
        "SGLang 0.5.22 serves with checksums that find faults where there are none",
        "engines/sglang/versions.py",
        '"finds what it would)": has_checksums,',
        '"finds what it would)": False,',
        "tests/unit/engines/test_sglang_versions.py",
    ),
    PlantedFault(
        "SGLang: servers with another type of cache go on",
        "engines/sglang/directory.py",
        "if theirs is not None and ours is not None and theirs != ours",
        "if theirs is not None and ours is None",
        "tests/unit/engines/test_quoted_refusals.py",
    ),
    PlantedFault(
        "what vLLM does not show of kvferry's log stays hidden",
        "engines/vllm/log_handlers.py",
        "        hidden.addHandler(handler)\n",
        "        pass\n",
        "tests/unit/engines/test_vllm_log_handlers.py",
    ),
    PlantedFault(
        "rooms that nobody asks for are not said while decode ranks are connected",
        "endpoint/early_warnings.py",
        "        while self._is_due(self._queued, now, QUEUED_S):\n",
        "        while False:\n",
        "tests/unit/endpoint/test_early_warnings.py",
    ),
)
