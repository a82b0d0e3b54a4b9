"""What kvferry would be beside interfaces that engines plan and have not built: in no wheel, and driven by tests.

`transport_interface` is what SGLang's `make_transport()` is assumed to return, `sglang_transport` kvferry behind it;
`self_describing_pools` is how SGLang's pools would say what they keep, `described_layout` what kvferry makes of it.
"""
