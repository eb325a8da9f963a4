"""Hardware counters read in-process through CUPTI: the library and its structs, the half that needs no GPU (metric
names, pass counts, evaluation), and the range profiler on a live GPU.
"""
