"""Stand-in inference servers: real processes, really in a named condition, that harm nothing.

`standin` launches one, `server` is its main process, `rank` a rank of it; `conditions` is the table of what
they can do.  To everything that reads /proc, the log and the port they look like SGLang: command line,
process titles, destroyed environment, threads that sit in futex, pollers that wake 100 times a second.
No model is loaded, no GPU is touched; nothing outlives the time limit or the launcher.
"""
