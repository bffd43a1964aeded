"""The catalogue of attacks and failures, by id: what each is about, in a few words, and for one
without a complete test why.

Tests name the cases that they cover by `@pytest.mark.case("ESC-01")`.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Case:
    """missing: what no test shows yet, or why none can."""

    about: str
    missing: str = ""


CASES: dict[str, Case] = {
    "ESC-01": Case("writing to the programs that run an environment, by /proc/PID/exe"),
    "ESC-02": Case("descriptors of the host as working directory, program or leftover"),
    "ESC-04": Case("a console that is swapped for a link: there is none, pipes alone"),
    "ESC-05": Case("a false /proc in the image"),
    "ESC-06": Case("mounting control groups, a release agent"),
    "ESC-07": Case("new namespaces by unshare, clone and clone3"),
    "ESC-08": Case("entering another's namespaces"),
    "ESC-09": Case("other processes and their files through /proc"),
    "ESC-10": Case("kernel settings that run a program of the host; the core handler"),
    "ESC-11": Case("abstract sockets of the host"),
    "ESC-12": Case("tracing and reading init, or a process on its way into the environment"),
    "ESC-13": Case("opening files by handle"),
    "ESC-14": Case("the mount calls by descriptor"),
    "ESC-15": Case("making and opening devices"),
    "ESC-16": Case(
        "virtual-machine sockets",
        "here they do not exist; what answers a guest comes with the microvm mechanism",
    ),
    "ESC-17": Case("service sockets of the host by path"),
    "ESC-18": Case("set-uid programs, file capabilities"),
    "ESC-20": Case("changing one's own security label"),
    "ESC-21": Case("taking over the process that reads an image"),
    "KRN-01": Case("io_uring, also at the start of Node"),
    "KRN-02": Case("userfaultfd"),
    "KRN-03": Case("calls that change or trace the kernel or the machine"),
    "KRN-04": Case("keys left for the next"),
    "KRN-05": Case("pushing input into a terminal, with high bits in the request"),
    "KRN-06": Case("calls of another architecture"),
    "KRN-07": Case("socket families and types"),
    "KRN-08": Case("network administration and rare protocols"),
    "KRN-09": Case("socket options that load code into the kernel or change framing"),
    "KRN-10": Case("personalities that weaken a program"),
    "KRN-11": Case(
        "writing to the image's cached pages",
        "the routes that are known are refused and a canary is compared; whether a kernel has the "
        "bugs is not tested",
    ),
    "KRN-14": Case("unknown calls, and threads of runtimes that try clone3 first"),
    "RES-01": Case("a fork bomb, of processes and of threads"),
    "RES-03": Case("memory, also when a parent hides its child's death"),
    "RES-04": Case(
        "bytes, empty files, attributes and names on the volume",
    ),
    "RES-05": Case("a background child that keeps the output open"),
    "RES-06": Case("processes that leave the session and ignore signals"),
    "RES-07": Case("endless output"),
    "RES-08": Case("many short processes, none of which meets a CPU limit"),
    "RES-09": Case("running out of descriptors, of those in flight, of timers and queues"),
    "RES-10": Case("sparse files of a huge size"),
    "RES-11": Case(
        "flushing to disk as a way to slow others",
        "sync does nothing, syncfs does not exist, and a storm is held to limits.io where that is "
        "set; without it, how long a neighbour waits is up to the disk",
    ),
    "RES-12": Case(
        "processes that stop or cannot be killed",
        "stopped ones, and the parent of a vfork; not a sleep that even a kill does not end, which "
        "takes a broken device: then the environment is quarantined (`tests/lifecycle`)",
    ),
    "RES-15": Case(
        "kernel memory: pipes, sockets, remembered names",
        "mounts and packet filters: nothing inside can make one (ESC-07, ESC-14, KRN-08)",
    ),
    "RES-16": Case("priorities, real-time classes, processor pinning, and a neighbour's share"),
    "RES-20": Case("a kernel of an environment that has no resource left to start a program"),
    "RES-21": Case("a workspace so large that its walk would take the steward's memory or time"),
    "RES-22": Case("a directory so large that its listing would take the steward's memory or time"),
    "FS-01": Case("paths of every form"),
    "FS-02": Case("links as the last component"),
    "FS-03": Case("a directory swapped for a link while the service looks"),
    "FS-04": Case("magic links, mount points"),
    "FS-05": Case("hard links to what others own"),
    "FS-06": Case("pipes, sockets and devices where a file is asked for"),
    "FS-07": Case("names of any bytes"),
    "FS-08": Case("files that change while they are read"),
    "FS-09": Case("who wrote a file last"),
    "FS-12": Case(
        "a link swapped in during removal",
        "links that are there are not followed; a race is not tried, since removal begins when the "
        "kernel has said that nobody is left to swap anything",
    ),
    "FS-13": Case("planted programs and libraries"),
    "FS-14": Case(
        "persistent directories replaced by links between runs",
        "no directory outlives an environment, so there is nothing to replace",
    ),
    "FS-15": Case("two environments of one tenant"),
    "FS-16": Case("a folder of the operator's that changes while an image is made of it"),
    "FS-17": Case("an image's archive that unpacks to terabytes, or announces them"),
    "FS-20": Case("directories so deep that no path names them"),
    "EGR-01": Case("direct connections of every kind that ignore the proxy's variables"),
    "EGR-02": Case("names: a query by UDP or TCP, a lookup, a name in a refused request"),
    "EGR-03": Case("names near a listed one: suffixes, apexes, more labels than the wildcard's"),
    "EGR-05": Case("a policy that is missing, empty or misspelt"),
    "EGR-06": Case("addresses in every form where a name is asked for"),
    "EGR-07": Case("a name that resolves differently the second time"),
    "EGR-08": Case("answers that are public but for one address"),
    "EGR-09": Case("addresses that carry another address"),
    "EGR-10": Case("answers in special-purpose ranges and at providers' addresses"),
    "EGR-12": Case("single labels, search domains, /etc/hosts, names of the inside"),
    "EGR-13": Case("controls, folded lines and other protocols where a request is expected"),
    "EGR-15": Case("other methods, absolute URIs, administration paths"),
    "EGR-16": Case("slow and huge requests, idle and unread tunnels, ten thousand connections"),
    "EGR-18": Case(
        "another server name inside the tunnel than was asked for",
        "refused where require_matching_sni is on; otherwise, and with Encrypted ClientHello or "
        "in the Host of HTTP, it is not seen",
    ),
    "EGR-19": Case("look-alikes, odd labels and lengths of names"),
    "EGR-20": Case("a gateway, the host, a neighbour and its proxy across a guest's link"),
    "EGR-21": Case("gaining an address on a guest's link: there is none but its loopback"),
    "EGR-22": Case("carrying data out by refusals"),
    "EGR-23": Case(
        "the host's own network at the moment of the dial: routes, multipath, a new address"
    ),
    "TTY-01": Case("a program that drives the operator's terminal: clipboard, title, questions"),
    "TTY-02": Case(
        "control characters in other forms: C1 in UTF-8, cut in pieces, direction marks"
    ),
    "TTY-03": Case("a program that paints a verdict, a prompt or an error of sbxctl"),
    "TTY-04": Case("names of files, images, tenants and runs in what every verb shows"),
    "EXP-01": Case("a link as the exported file, or on the way to it"),
    "EXP-02": Case("a second name of the exported file"),
    "EXP-03": Case("pipes, sockets, devices and directories as the exported file"),
    "EXP-04": Case("a file that is swapped or changed during its export"),
    "EXP-06": Case("a file that is too large, sparse, growing, or has nearly the name"),
    "EXP-07": Case("text that is none, or that holds what a reader does not see"),
    "EXP-08": Case("cells that a spreadsheet takes for formulas"),
    "EXP-09": Case("text that is costly to look through: one long line, many rows, many quotes"),
    "EXP-10": Case("file names that carry paths, headers or direction marks"),
    "EXP-11": Case("bytes lost or changed between the workspace and the store, or in the store"),
    "EXP-13": Case("archives and packed streams, of another type, behind something, polyglots"),
    "API-01": Case("the service's own sockets from inside"),
    "API-02": Case("a wrong uid; a missing or wrong credential"),
    "API-03": Case("a connection that is handed to another process"),
    "API-04": Case("a peer's pid that is reused", "the pid is written down and never looked at"),
    "API-05": Case("a planted socket, or a link in its place"),
    "API-06": Case("malformed, slow and idle connections"),
    "API-09": Case("handles of another tenant or peer, guessed and outdated ones"),
    "API-10": Case("a client that asks and never reads"),
    "API-11": Case("commands of a wrong form"),
    "API-13": Case("two commands at once, destroying in the middle, twice"),
    "API-14": Case(
        "paths of the host in errors",
        "the client's and the mechanism's are looked at; not every error of every verb is provoked",
    ),
    "API-15": Case("a client that disconnects in a command"),
    "PEER-10": Case("a listing that is larger than what is sent, and does not say so"),
    "PEER-11": Case("a worker that makes the service hold memory for it, and takes nothing"),
    "PEER-12": Case("a message that says a thing twice"),
    "PEER-13": Case("values that no message may carry, from a caller's own code"),
    "AUD-01": Case("field names and line ends in whatever a record holds"),
    "AUD-02": Case("escape sequences and priority prefixes in what a record says"),
    "AUD-04": Case("many denials at once, against the journal's rate limit"),
    "AUD-05": Case("a journal that is stopped, that reads nothing, or whose spool is full"),
    "AUD-06": Case(
        "a flood of the host's log by refused system calls",
        "a filter's answers are errno values, and none of them logs; no flood is tried",
    ),
    "AUD-07": Case("secrets in arguments"),
    "DMN-20": Case("links, pipes and others' files in the image store, which the daemon writes"),
    "DMN-21": Case("hostile values in every field of every request to the launcher"),
    "DMN-22": Case("a blob of an image with a second name"),
    "AUD-08": Case("values and lists so long that what matters is cut off unseen"),
    "LIF-01": Case("SIGKILL of the daemon or the launcher between intent, resource and commit"),
    "LIF-02": Case("a worker that is killed in a command"),
    "LIF-04": Case(
        "planted leftovers that look like ours",
        "there is no lock file to plant; a name that is no id is quarantined, one that is is taken "
        "for ours",
    ),
    "LIF-05": Case(
        "a journal that is torn, full, read-only or corrupt",
        "by SQLite's own failures; no device loses power under it",
    ),
    "LIF-07": Case("an operator who stops a scope or executes the manager anew"),
    "LIF-08": Case("forking while being killed"),
    "LIF-09": Case("control groups made or left from inside"),
    "LIF-10": Case("a clean-up that fails again and again"),
    "LIF-11": Case(
        "two sandboxes of one pool: nothing random is shared",
        "of the pool: no mechanism restores one from a template",
    ),
    "LIF-12": Case("what one tenant leaves on a slot for the next"),
    "LIF-13": Case("SIGTERM under load"),
    "PEER-30": Case("workspaces with so many files that erasing them keeps others waiting"),
    "PEER-31": Case("workspaces so deep that erasing them takes descriptors or time without end"),
    "PEER-32": Case("a restart while workspaces of the dead are not erased yet"),
    "DMN-15": Case("the eraser's process, were it taken over"),
    "DMN-16": Case("files of a workspace through the daemon's descriptor of the volume"),
    "PEER-01": Case("a descriptor in flight whose close sleeps, to a daemon's socket"),
    "PEER-02": Case("the same from a peer that is refused: not listed, or one too many"),
    "PEER-03": Case("closes that sleep, more than there are threads for"),
    "PEER-04": Case("a socket beside the one path that accepts"),
    "PEER-05": Case("the same to a lease authority, or from one to the daemon"),
    "PEER-40": Case("connections that break the protocol, one after the other without a pause"),
    "PEER-41": Case("worker uids that together take every connection"),
    "PEER-42": Case("a listening socket whose queue is full of another uid's connections"),
    "PEER-06": Case("one worker uid that takes every place"),
    "DMN-01": Case("a descriptor in flight whose close sleeps, to the launcher"),
    "DMN-02": Case("the same from a daemon to a worker"),
    "DMN-03": Case("requests that make the launcher remember ever more"),
    "PEER-20": Case("refusals without end, to fill the journal until earlier records are gone"),
    "PEER-21": Case("refusals from more uids than are told apart"),
    "PEER-22": Case(
        "refused requests that are cancelled or left, and refused connections, at will"
    ),
    "DMN-10": Case("links, pipes and other files in the place of what root reads of the daemon"),
    "DMN-11": Case("a folder that a group may write to, in which a service writes"),
}
