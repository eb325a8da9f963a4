"""The private torch APIs that fxopt stands on, one module per API.

`dynamo` holds what Dynamo hands a backend (graph modules, placeholders' sources, tracing and guard state);
`inductor` holds `compile_fx`, its configuration and its custom-pass slots. Nothing else in fxopt or passes
imports `torch._dynamo`, `torch._inductor` or `torch._functorch`, so a change in torch is met in one place.
"""
