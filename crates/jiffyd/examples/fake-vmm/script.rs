//! Ways in which the VM misbehaves.

/// What the VM does wrong.
#[derive(Debug, Default)]
pub struct Script {
    /// The VMM can't build the VM.
    pub start_failed: bool,
    /// The guest never sends anything.
    pub mute: bool,
    /// Neither the agent nor the control socket accepts requests.
    pub deaf: bool,
    /// The agent accepts requests and answers none.
    pub hung_agent: bool,
    /// Other programs in the guest send invalid data to the supervisor port.
    pub garbage: bool,
    /// The agent answers `exec` with invalid data.
    pub exec_garbage: bool,
    /// The guest crashes once its command runs.
    pub crash: bool,
    /// The VMM dies by SIGKILL in the middle of a message of `exec`.
    pub die_in_message: bool,
    /// Init warns, and a service writes a line.
    pub warn: bool,
    /// The guest writes marks without end.
    pub flood: bool,
    /// Other programs in the guest repeatedly send a hello to the supervisor port, each followed by
    /// endless output, until the file `go` exists in the VM's folder; then they open a hundred
    /// silent connections.
    pub storm: bool,
    /// The guest powers off before its command has ended.
    pub early_off: bool,
    /// The guest sends the name server a few packets.
    pub queries: bool,
    /// The guest sends the name server packets without end.
    pub query_flood: bool,
    /// The VMM can't capture the VM.
    pub capture_fails: bool,
    /// A capture creates the file `capturing` in the VM's folder, waits for a file `go`, and
    /// creates `captured` at its end.
    pub held_capture: bool,
    /// The VMM ends after it has answered a capture.
    pub ends_captured: bool,
    /// RAM has 8 MiB that can't be compressed.
    pub filled: bool,
    /// The guest sends nothing until the file `go` exists in the VM's folder.
    pub held: bool,
    /// A guest that powers off creates the file `off` in the VM's folder, writes back until the
    /// file `go` exists, and then creates `written`.
    pub slow_off: bool,
    /// The guest's init is of release 0.1.
    pub old: bool,
    /// The guest's init is of the next release.
    pub newer: bool,
    /// The command ends while the vCPUs are being stopped.
    pub end_at_pause: bool,
    /// The guest's init connects, abandons that connection and connects again; the abandoned hello
    /// still arrives. It loses the second connection after its command's end is stored, before it
    /// is told, and is slow on the next.
    pub redials: bool,
    /// The guest is ready a while before it reports its command.
    pub slow_report: bool,
    /// The VMM refuses twice to resume the vCPUs.
    pub resume_fails: bool,
    /// The guest reports 100 MiB of available memory, 20 of them free.
    pub caches: bool,
    /// The guest reports that it can do without all of its memory.
    pub spare_memory: bool,
    /// The VMM reads and writes 640 KiB a second, without a disk.
    pub moves_data: bool,
    /// A vCPU is always busy.
    pub busy: bool,
    /// The guest uses 96 MiB.
    pub uses_memory: bool,
    /// The guest uses more and more memory until the file `enough` exists in the VM's folder.
    pub grows: bool,
    /// The guest neither gives memory back nor takes more.
    pub keeps_memory: bool,
}

impl Script {
    pub fn parse(command_line: &str) -> Script {
        let mut script = Script::default();
        for word in command_line.split(' ') {
            match word.strip_prefix("fake=") {
                Some("start-failed") => script.start_failed = true,
                Some("mute") => script.mute = true,
                Some("deaf") => script.deaf = true,
                Some("hung-agent") => script.hung_agent = true,
                Some("garbage") => script.garbage = true,
                Some("exec-garbage") => script.exec_garbage = true,
                Some("crash") => script.crash = true,
                Some("die-in-message") => script.die_in_message = true,
                Some("warn") => script.warn = true,
                Some("flood") => script.flood = true,
                Some("storm") => script.storm = true,
                Some("queries") => script.queries = true,
                Some("query-flood") => script.query_flood = true,
                Some("early-off") => script.early_off = true,
                Some("capture-fails") => script.capture_fails = true,
                Some("held-capture") => script.held_capture = true,
                Some("ends-captured") => script.ends_captured = true,
                Some("filled") => script.filled = true,
                Some("slow-off") => script.slow_off = true,
                Some("old") => script.old = true,
                Some("newer") => script.newer = true,
                Some("end-at-pause") => script.end_at_pause = true,
                Some("resume-fails") => script.resume_fails = true,
                Some("redials") => script.redials = true,
                Some("slow-report") => script.slow_report = true,
                Some("caches") => script.caches = true,
                Some("spare-memory") => script.spare_memory = true,
                Some("moves-data") => script.moves_data = true,
                Some("busy") => script.busy = true,
                Some("uses-memory") => script.uses_memory = true,
                Some("grows") => script.grows = true,
                Some("keeps-memory") => script.keeps_memory = true,
                Some("held") => script.held = true,
                Some(other) => panic!("fake={other}"),
                None => {}
            }
        }
        script
    }
}
