"""The cards: what the driver and the kernel log say of them, and which process holds them.

`nvml` is the only module that imports pynvml; it runs as a child process, for a driver call can hang for ever, and
`nvml_child` talks to it.  `owners` and `unowned` join its answers with the processes, `xid` and `kernel_log` read the
kernel's faults; `collector` is the source.
"""
