"""Stand-in inference servers: real processes, really in a named condition, that harm nothing.

`table` holds the conditions: what each is made of (`steps`: who does what, and when) and what should be said of it.
`standin` launches one with what lives beside it (`neighbours`); `server` is its first process, `rank` a rank of it,
`rank_acts` what ranks do out of the ordinary, `front` its port.  What they write is told by `stories`: SGLang and vLLM.
To everything that reads /proc, the log and the port they look like these: command line, process titles, destroyed
environment, threads that sit in futex, pollers that wake 100 times a second.
No model is loaded, no GPU is touched; nothing outlives the time limit or the launcher.
"""
