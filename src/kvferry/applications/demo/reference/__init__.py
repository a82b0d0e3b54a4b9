"""The demo's engine: a real transformers language model, split into a prefill half and a decode half.

    specification   which model: seeded sizes or a checkpoint's directory, and both in transformers' terms
    caches          which components a model caches; from transformers' cache to arrays and back
    tokenizer       text to token ids and back
    engine          `load_model` and `ReferenceModel`: prefill, decode, and the undivided model beside them
    prompts         the prompts that the demo sends
    preload         for fork servers: imports torch and transformers once for all processes

Nothing but `preload` imports torch or transformers before a model is loaded: both come with the extra `kvferry[demo]`.
"""
