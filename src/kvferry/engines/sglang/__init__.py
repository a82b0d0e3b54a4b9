"""kvferry as a transfer backend of SGLang 0.5.22 and 0.5.23.

`plugin` is what SGLang loads; `manager`, `sender`, `receiver` and `bootstrap` are what its scheduler then calls, and
`transfers` is what two of them share; `rank_caches` and `prefill_server` are what a manager knows of its rank and of
prefill servers. Only these, `plugin` included, import SGLang when they are loaded. `layouts` describes its caches,
`metadata_rows` carries its first token, `directory` lets the two sides find each other through its bootstrap servers.
`contract` is what all of it builds on in SGLang, `versions` what the older version has otherwise.
"""
