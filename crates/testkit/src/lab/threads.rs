//! What the programs in the machine wait for, for the report of one that did not end in time.

use jiffy_machine::client::AgentAddress;
use jiffy_wire::agent::{Command, ExecOutput, Stream};
use std::time::{Duration, Instant};

/// Prints each thread of each program: CPU time in ticks, system call, and the innermost functions
/// of the kernel that it is in (proc(5)).
const SCRIPT: &str = r#"
uptime
for process in /proc/[0-9]*; do
    # Threads of the kernel execute no file.
    [ -e "$process/exe" ] || continue
    line=$(tr '\0' ' ' <"$process/cmdline" 2>/dev/null | cut -c 1-120)
    [ -n "$line" ] && [ "$process" != "/proc/$$" ] || continue
    echo "${process#/proc/} $line"
    for thread in "$process"/task/*; do
        echo "    ${thread##*/} $(cat "$thread/comm") $(sed 's/.*) //' "$thread/stat" | cut -d ' ' -f 1,12,13)" \
            "$(cut -d ' ' -f 1-3 "$thread/syscall")" "$(head -n 5 "$thread/stack" | sed 's/.* //; s/+.*//' | tr '\n' ' ')"
    done
done 2>/dev/null
"#;
/// Time limit of the script, which starts several programs for each thread.
const TIME: Duration = Duration::from_secs(120);

/// A list of all threads of programs, or why there is none.
pub fn list(agent: &AgentAddress) -> String {
    match run(agent) {
        Ok(text) => text,
        Err(error) => format!("no list: {error}"),
    }
}

fn run(agent: &AgentAddress) -> Result<String, jiffy_machine::MachineError> {
    let until = Instant::now() + TIME;
    let command = Command {
        argv: ["/bin/sh", "-c", SCRIPT].map(str::to_owned).to_vec(),
        ..Command::default()
    };
    let mut session = agent.exec(command, false)?;
    let mut text = Vec::new();
    loop {
        let left = until.saturating_duration_since(Instant::now());
        session.set_time_limit(Some(left.max(Duration::from_millis(1))))?;
        match session.receive()? {
            Some(ExecOutput::Output {
                stream: Stream::Stdout,
                data,
            }) => text.extend(data),
            Some(ExecOutput::Exited(_)) | None => break,
            Some(_) => {}
        }
    }
    Ok(String::from_utf8_lossy(&text).into_owned())
}
