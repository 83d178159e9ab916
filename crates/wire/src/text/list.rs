//! The list of VMs as text.
//!
//! The node writes it, which takes some 2,000 instructions per VM in all. It took 48,000 when the
//! node sent whole VMs as JSON and `jiffy` made the list.

use super::table::Table;
use super::{push_age, push_number, size};
use crate::api::{IdleAction, Origin, Vm, VmIdle, VmState};

/// Media type in `Accept` for this list instead of JSON.
pub const MEDIA_TYPE: &str = "text/plain";

/// Suffix of the status of a VM that has not ended and has an error.
pub const ERROR: &str = " (error)";

/// Bytes of a VM's cells in a typical list.
const TYPICAL: usize = 100;

/// A list to which VMs are added.
pub struct List {
    table: Table<10>,
    /// Unix time, seconds.
    now: u64,
    /// Memory size of the last VM and its text, because most VMs have the same size.
    memory: (u32, String),
}

impl List {
    /// An empty list with capacity for so many VMs; `now` is the Unix time in seconds for ages.
    pub fn new(vms: usize, now: u64) -> List {
        let mut table = Table::new([
            "ID", "NAME", "IMAGE", "KERNEL", "CPUS", "MEMORY", "COMMAND", "CREATED", "STATUS",
            "ORIGIN",
        ]);
        table.reserve(vms, vms * TYPICAL);
        List {
            table,
            now,
            memory: (0, size(0)),
        }
    }

    /// A list of these VMs.
    pub fn of(vms: &[Vm], now: u64) -> List {
        let mut list = List::new(vms.len(), now);
        vms.iter().for_each(|vm| list.add(vm));
        list
    }

    /// Adds a VM.
    pub fn add(&mut self, vm: &Vm) {
        let List { table, now, memory } = self;
        if memory.0 != vm.memory_mib {
            *memory = (vm.memory_mib, size(u64::from(vm.memory_mib) << 20));
        }
        for cell in [&vm.id, &vm.name, &vm.image, &vm.kernel] {
            table.cell(cell);
        }
        table.cell_with(|cell| push_number(cell, vm.cpus.into()));
        table.cell_with(|cell| cell.push_str(&memory.1));
        table.cell_with(|cell| push_command(cell, vm.command.as_deref()));
        table.cell_with(|cell| {
            push_age(cell, vm.created, *now);
            cell.push_str(" ago");
        });
        table.cell_with(|cell| push_status(cell, vm, *now));
        table.cell_with(|cell| push_origin(cell, vm));
    }

    /// The lines.
    pub fn text(&self) -> String {
        self.table.text()
    }
}

/// Most characters of a command in a list.
const MAX_COMMAND: usize = 32;

/// A command, cut off after 32 characters.
pub fn command(argv: Option<&[String]>) -> String {
    let mut command = String::new();
    push_command(&mut command, argv);
    command
}

/// Appends [`command`].
fn push_command(text: &mut String, argv: Option<&[String]>) {
    let Some(argv) = argv else {
        return text.push('-');
    };
    let begin = text.len();
    for (number, word) in argv.iter().enumerate() {
        if number > 0 {
            text.push(' ');
        }
        text.push_str(word);
        // A character has at most four bytes, so this covers all that is shown.
        if text.len() - begin > MAX_COMMAND * 4 {
            break;
        }
    }
    let shown = &text[begin..];
    if shown.len() > MAX_COMMAND && shown.chars().nth(MAX_COMMAND).is_some() {
        let kept: usize = shown
            .chars()
            .take(MAX_COMMAND - 1)
            .map(char::len_utf8)
            .sum();
        text.truncate(begin + kept);
        text.push('…');
    }
}

/// Appends the origin of a VM's memory. A golden snapshot is not shown, because it is like a boot.
fn push_origin(cell: &mut String, vm: &Vm) {
    let (how, name) = match &vm.origin {
        Some(Origin::From(name)) => ("from ", name),
        Some(Origin::ForkedFrom(name)) => ("forked from ", name),
        Some(Origin::Golden) | None => return,
    };
    cell.push_str(how);
    cell.push_str(name);
}

fn push_status(cell: &mut String, vm: &Vm, now: u64) {
    let up = |cell: &mut String| {
        cell.push_str("Up ");
        push_age(cell, vm.started.unwrap_or(vm.created), now);
    };
    let ago = |cell: &mut String| {
        cell.push(' ');
        push_age(cell, vm.ended.unwrap_or(vm.created), now);
        cell.push_str(" ago");
    };
    match vm.state {
        VmState::Created => cell.push_str("Created"),
        VmState::Starting => cell.push_str("Starting"),
        VmState::Running => {
            up(cell);
            if let Some(idle) = &vm.idle {
                push_idle(cell, idle);
            }
        }
        VmState::Paused => {
            up(cell);
            cell.push_str(" (paused)");
        }
        VmState::Stopping => cell.push_str("Stopping"),
        VmState::Hibernated => {
            cell.push_str("Hibernated");
            ago(cell);
        }
        VmState::Exited => {
            match (vm.exit, vm.error.is_some()) {
                (Some(exit), _) => cell.push_str(&format!("Exited ({})", exit.shell_code())),
                (None, true) => cell.push_str("Failed"),
                (None, false) => cell.push_str("Ended"),
            }
            ago(cell);
        }
    }
    // The status of an exited VM contains the error already.
    if vm.error.is_some() && vm.state != VmState::Exited {
        cell.push_str(ERROR);
    }
}

/// Since when a VM has been idle, or what keeps it awake, and whether it stays awake although it is
/// idle.
fn push_idle(cell: &mut String, idle: &VmIdle) {
    if let Some(seconds) = idle.idle_s {
        cell.push_str(" (idle ");
        push_age(cell, 0, seconds);
        cell.push(')');
    } else if !idle.awake.is_empty() {
        cell.push_str(" (awake: ");
        cell.push_str(&idle.awake.join(", "));
        cell.push(')');
    }
    if idle.error.is_some() {
        cell.push_str(match idle.action {
            IdleAction::Hibernate => " (can't sleep)",
            IdleAction::Stop => " (can't be stopped)",
        });
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::agent::ExitStatus;
    use crate::api::IdlePolicy;

    fn vm(state: VmState) -> Vm {
        serde_json::from_value(serde_json::json!({
            "id": "0123456789ab", "name": "web", "state": state, "image": "base",
            "kernel": "base", "cpus": 1, "memory_mib": 128,
            "command": ["sh", "-c", "while true; do echo a very long command; done"],
            "disks": [], "created": 100, "started": 160, "ended": null, "pid": null, "cid": 3,
            "exit": null, "error": null, "remove": false
        }))
        .unwrap()
    }

    fn told(vm: &Vm) -> String {
        let mut status = String::new();
        push_status(&mut status, vm, 220);
        status
    }

    #[test]
    fn a_status_includes_its_age() {
        assert_eq!(told(&vm(VmState::Running)), "Up 1 minute");
        assert_eq!(told(&vm(VmState::Paused)), "Up 1 minute (paused)");
        let mut idle = vm(VmState::Running);
        idle.idle = Some(VmIdle {
            idle_s: Some(30),
            ..IdlePolicy {
                after_s: 300,
                action: IdleAction::Hibernate,
            }
            .into()
        });
        assert_eq!(told(&idle), "Up 1 minute (idle 30 seconds)");
        if let Some(idle) = &mut idle.idle {
            idle.idle_s = None;
            idle.awake = vec!["1 exec".into(), "CPU 12.0 %".into()];
        }
        assert_eq!(told(&idle), "Up 1 minute (awake: 1 exec, CPU 12.0 %)");
        if let Some(idle) = &mut idle.idle {
            idle.idle_s = Some(600);
            idle.awake.clear();
            idle.error = Some("The disk is full.".into());
        }
        let status = "Up 1 minute (idle 10 minutes) (can't sleep)";
        assert_eq!(told(&idle), status);
        if let Some(idle) = &mut idle.idle {
            idle.action = IdleAction::Stop;
        }
        assert!(told(&idle).ends_with(" (can't be stopped)"));
        let mut asleep = vm(VmState::Hibernated);
        asleep.ended = Some(215);
        assert_eq!(told(&asleep), "Hibernated 5 seconds ago");
        let mut unheard = vm(VmState::Running);
        unheard.error = Some("its guest can't be heard".into());
        assert_eq!(told(&unheard), "Up 1 minute (error)");
        let mut ended = vm(VmState::Exited);
        ended.ended = Some(215);
        assert_eq!(told(&ended), "Ended 5 seconds ago");
        ended.error = Some("it broke".into());
        assert_eq!(told(&ended), "Failed 5 seconds ago");
        ended.exit = Some(ExitStatus::Signal(9));
        assert_eq!(told(&ended), "Exited (137) 5 seconds ago");
    }

    #[test]
    fn a_long_command_is_truncated() {
        let shown = command(vm(VmState::Running).command.as_deref());
        assert_eq!(shown, "sh -c while true; do echo a ver…");
        assert_eq!(shown.chars().count(), MAX_COMMAND);
    }
}
