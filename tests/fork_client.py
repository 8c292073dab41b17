"""The place-holder of a forked program (`forks.py`). In: a socket, the real program, its arguments. Out: what
the forked program gives; the real program itself where it is not one that is forked."""

import json
import os
import select
import signal
import socket
import sys

place, program, *arguments = sys.argv[1:]
meant = [word for word in arguments if word != "-u"][:1]
if program.endswith("python") and (not meant or (meant[0].startswith("-") and meant[0] not in ("-c", "-m"))):
    os.execv(program, [program, *arguments])
descriptors = []
for number in map(int, os.listdir("/proc/self/fd")):
    try:
        os.fstat(number)
        descriptors.append(number)
    except OSError:  # of the listing itself
        pass
handed_on = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
order = {
    "program": program,
    "arguments": arguments,
    "folder": os.getcwd(),
    "environment": dict(os.environ),
    "descriptors": descriptors,
    "ignored": [number for number in handed_on if signal.getsignal(number) == signal.SIG_IGN],
}
text = json.dumps(order).encode()
server = socket.socket(socket.AF_UNIX)
# a signal is a byte in a pipe: a handler in Python would wait for a `recv` that has just begun
received, to_receive = os.pipe()
os.set_blocking(to_receive, False)
signal.set_wakeup_fd(to_receive)
for number in handed_on:
    signal.signal(number, lambda *_: None)
signal.pthread_sigmask(signal.SIG_BLOCK, handed_on)  # none between the bytes of the order
server.connect(place)
socket.send_fds(server, [len(text).to_bytes(4, "big")], descriptors)
server.sendall(text)
signal.pthread_sigmask(signal.SIG_UNBLOCK, handed_on)
while server not in select.select([server, received], [], [])[0]:
    server.sendall(os.read(received, 64))
said = server.recv(4)
if not said:
    sys.exit("the process that forks has gone")
status = int.from_bytes(said, "big")
if os.WIFSIGNALED(status):
    if os.WTERMSIG(status) != signal.SIGKILL:
        signal.signal(os.WTERMSIG(status), signal.SIG_DFL)
    os.kill(os.getpid(), os.WTERMSIG(status))
for number in descriptors:
    os.close(number)
os._exit(os.WEXITSTATUS(status))
