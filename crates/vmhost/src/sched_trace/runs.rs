//! Switches and wakeups into threads and their runs.

use super::pages::Format;
use crate::scheduler::ProcessChange;
use jiffy_wire::api::{SchedRun, SchedThread};
use jiffy_wire::sched::Class;
use std::collections::HashMap;

/// `CLONE_THREAD` (linux/sched.h).
const CLONE_THREAD: u64 = 0x10000;
/// States of a task that is not runnable (`TASK_REPORT`, linux/sched.h); the bit above says that it
/// was preempted.
const NOT_RUNNABLE: u64 = 0xff;
/// The thread that starts all kernel threads.
const KTHREADD: u32 = 2;
/// The priority of nice 0: a task with a nice value is not urgent.
const NICE_0: u64 = 120;
/// The priority of nice 10, from which on the policy takes a task for background work.
const NICE_10: u64 = 130;
/// Lower ones are real-time.
const NICE_LEAST: u64 = 100;

/// The events that are recorded; [`event`] knows each by its position.
pub const EVENTS: [&str; 4] = [
    "sched/sched_switch",
    "sched/sched_wakeup",
    "sched/sched_wakeup_new",
    "task/task_newtask",
];

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    pub at_ns: u64,
    pub cpu: u32,
    pub what: What,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A CPU goes on with another task.
    Switch {
        last: Task,
        runnable: bool,
        next: Task,
    },
    /// A task can run.
    Wakeup { tid: u32 },
    /// A task begins.
    Begin {
        tid: u32,
        name: String,
        parent: u32,
        is_thread: bool,
    },
}

/// A task in a switch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Task {
    pub tid: u32,
    pub name: String,
    pub priority: u64,
}

/// Reads one event; `None` if it is another, or not as its format says.
pub fn event(formats: &[Format], at_ns: u64, cpu: u32, data: &[u8]) -> Option<Event> {
    let id = u16::from_ne_bytes(*data.first_chunk()?);
    let at = formats
        .iter()
        .position(|format| format.id == u32::from(id))?;
    let format = &formats[at];
    let number = |field: &str| format.number(data, field);
    let tid = |field: &str| u32::try_from(number(field)?).ok();
    let task = |id, name, priority| {
        Some(Task {
            tid: tid(id)?,
            name: format.name(data, name)?,
            priority: number(priority)?,
        })
    };
    let what = match at {
        0 => What::Switch {
            last: task("prev_pid", "prev_comm", "prev_prio")?,
            runnable: number("prev_state")? & NOT_RUNNABLE == 0,
            next: task("next_pid", "next_comm", "next_prio")?,
        },
        1 | 2 => What::Wakeup { tid: tid("pid")? },
        _ => What::Begin {
            tid: tid("pid")?,
            name: format.name(data, "comm")?,
            parent: tid("common_pid")?,
            is_thread: number("clone_flags")? & CLONE_THREAD != 0,
        },
    };
    Some(Event { at_ns, cpu, what })
}

/// A thread that was there when the recording began.
#[derive(Debug, Clone)]
pub struct Present {
    pub tid: u32,
    pub pid: u32,
    pub name: String,
    pub is_kernel: bool,
}

#[derive(Debug)]
struct Known {
    thread: SchedThread,
    is_kernel: bool,
    /// Since when it could run, while it does not.
    ready_ns: Option<u64>,
    /// Its position among the threads that ran.
    place: Option<u32>,
}

/// A thread on a CPU.
#[derive(Debug)]
struct Running {
    /// Its position among those that are known.
    thread: usize,
    priority: u64,
    start_ns: u64,
    waited_ns: u64,
}

/// Collects runs.
#[derive(Debug)]
pub struct Runs {
    begin_ns: u64,
    /// Which VMs and classes processes have, oldest first; from it, what is past.
    told: Vec<ProcessChange>,
    /// Whether runs have classes.
    classes: bool,
    known: Vec<Known>,
    /// The latest thread with an id.
    by_tid: HashMap<u32, usize>,
    /// What runs on each CPU.
    running: HashMap<u32, Running>,
    last_ns: HashMap<u32, u64>,
    ran: u32,
    runs: Vec<SchedRun>,
}

impl Runs {
    /// Begins with the threads that are there.
    pub fn new(
        begin_ns: u64,
        present: Vec<Present>,
        told: Vec<ProcessChange>,
        classes: bool,
    ) -> Runs {
        let mut runs = Runs {
            begin_ns,
            told,
            classes,
            known: Vec::new(),
            by_tid: HashMap::new(),
            running: HashMap::new(),
            last_ns: HashMap::new(),
            ran: 0,
            runs: Vec::new(),
        };
        for one in present {
            runs.add(one);
        }
        runs
    }

    fn add(&mut self, new: Present) -> usize {
        self.by_tid.insert(new.tid, self.known.len());
        self.known.push(Known {
            thread: SchedThread {
                tid: new.tid,
                pid: new.pid,
                name: new.name,
                ..SchedThread::default()
            },
            is_kernel: new.is_kernel,
            ready_ns: None,
            place: None,
        });
        self.known.len() - 1
    }

    /// The thread with this id, which may have been missed.
    fn thread(&mut self, tid: u32) -> usize {
        match self.by_tid.get(&tid) {
            Some(at) => *at,
            None => self.add(Present {
                tid,
                pid: tid,
                name: String::new(),
                is_kernel: false,
            }),
        }
    }

    /// Takes the next event. Events come in the order of their times.
    pub fn push(&mut self, event: Event) {
        let Event { at_ns, cpu, what } = event;
        // The kernel records before the beginning is known.
        let at_ns = at_ns.max(self.begin_ns);
        self.last_ns.insert(cpu, at_ns);
        match what {
            What::Begin {
                tid,
                name,
                parent,
                is_thread,
            } => {
                let of = self.thread(parent);
                let pid = match is_thread {
                    true => self.known[of].thread.pid,
                    false => tid,
                };
                let is_kernel = parent == KTHREADD;
                self.add(Present {
                    tid,
                    pid,
                    name,
                    is_kernel,
                });
            }
            What::Wakeup { tid } => {
                let at = self.thread(tid);
                let runs = self.running.values().any(|running| running.thread == at);
                if !runs {
                    self.known[at].ready_ns.get_or_insert(at_ns);
                }
            }
            What::Switch {
                last,
                runnable,
                next,
            } => {
                let begun = self.running.remove(&cpu);
                if last.tid != 0 {
                    let at = self.thread(last.tid);
                    // Before the first switch, it ran since the beginning.
                    let begun = begun.unwrap_or(Running {
                        thread: at,
                        priority: last.priority,
                        start_ns: self.begin_ns,
                        waited_ns: 0,
                    });
                    self.known[at].thread.name = last.name;
                    self.ran(cpu, begun, at_ns);
                    self.known[at].ready_ns = runnable.then_some(at_ns);
                }
                if next.tid != 0 {
                    let at = self.thread(next.tid);
                    self.known[at].thread.name = next.name;
                    let ready_ns = self.known[at].ready_ns.take();
                    let waited_ns = ready_ns.map_or(0, |ready_ns| at_ns.saturating_sub(ready_ns));
                    let begun = Running {
                        thread: at,
                        priority: next.priority,
                        start_ns: at_ns,
                        waited_ns,
                    };
                    self.running.insert(cpu, begun);
                }
            }
        }
    }

    /// A run ended. One that ended before the beginning does not count.
    fn ran(&mut self, cpu: u32, begun: Running, end_ns: u64) {
        let Running {
            thread: at,
            priority,
            start_ns,
            waited_ns,
        } = begun;
        if end_ns == self.begin_ns {
            return;
        }
        let class = self.class(at, priority, start_ns);
        let known = &mut self.known[at];
        let thread = *known.place.get_or_insert_with(|| {
            self.ran += 1;
            self.ran - 1
        });
        self.runs.push(SchedRun {
            cpu,
            thread,
            start_ns,
            end_ns,
            waited_ns,
            class,
        });
    }

    /// As `class_of` of the policy finds it, without what the policy demotes on its own.
    fn class(&self, at: usize, priority: u64, at_ns: u64) -> Option<Class> {
        if !self.classes || priority < NICE_LEAST {
            return None;
        }
        let known = &self.known[at];
        let told = self.told.iter().rev();
        let mut told = told.filter(|told| told.pid == known.thread.pid && told.at_ns <= at_ns);
        Some(if priority >= NICE_10 {
            Class::Background
        } else {
            let told = told.find_map(|told| told.class);
            match told.or(known.is_kernel.then_some(Class::Urgent)) {
                Some(Class::Urgent) if priority > NICE_0 => Class::Steady,
                class => class.unwrap_or(Class::Steady),
            }
        })
    }

    /// The threads that ran, and their runs, at the recording's end. A CPU in `full` lost its last
    /// events: what became of its task is not known.
    pub fn end(mut self, end_ns: u64, full: &[u32]) -> (Vec<SchedThread>, Vec<SchedRun>) {
        let mut running: Vec<_> = std::mem::take(&mut self.running).into_iter().collect();
        running.sort_unstable_by_key(|(cpu, _)| *cpu);
        for (cpu, begun) in running {
            let last_ns = self.last_ns.get(&cpu).copied().unwrap_or(end_ns);
            let end_ns = if full.contains(&cpu) { last_ns } else { end_ns };
            let end_ns = end_ns.max(begun.start_ns);
            self.ran(cpu, begun, end_ns);
        }
        let leaders: HashMap<u32, String> = self
            .known
            .iter()
            .filter(|known| known.thread.tid == known.thread.pid)
            .map(|known| (known.thread.pid, known.thread.name.clone()))
            .collect();
        let mut threads = vec![SchedThread::default(); self.ran as usize];
        for known in self.known {
            let Some(place) = known.place else { continue };
            let mut thread = known.thread;
            let process = leaders.get(&thread.pid);
            thread.process = process.unwrap_or(&thread.name).clone();
            let mut told = self.told.iter().rev();
            thread.vm = told
                .find(|told| told.pid == thread.pid && told.vm.is_some())
                .and_then(|told| told.vm.clone());
            threads[place as usize] = thread;
        }
        (threads, self.runs)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn task(tid: u32, name: &str, priority: u64) -> Task {
        Task {
            tid,
            name: name.into(),
            priority,
        }
    }

    fn idle() -> Task {
        task(0, "swapper/0", 120)
    }

    fn present(tid: u32, pid: u32, name: &str) -> Present {
        Present {
            tid,
            pid,
            name: name.into(),
            is_kernel: pid == 9,
        }
    }

    fn told(at_ns: u64, pid: u32, vm: Option<&str>, class: Option<Class>) -> ProcessChange {
        ProcessChange {
            at_ns,
            pid,
            vm: vm.map(str::to_owned),
            class,
        }
    }

    /// Events of CPU 0, and those of others.
    fn of(runs: &mut Runs, events: Vec<(u64, u32, What)>) {
        for (at_ns, cpu, what) in events {
            runs.push(Event { at_ns, cpu, what });
        }
    }

    fn switch(last: Task, runnable: bool, next: Task) -> What {
        What::Switch {
            last,
            runnable,
            next,
        }
    }

    fn rows(runs: &[SchedRun]) -> Vec<(u32, u32, u64, u64, u64)> {
        let row = |run: &SchedRun| (run.cpu, run.thread, run.start_ns, run.end_ns, run.waited_ns);
        runs.iter().map(row).collect()
    }

    #[test]
    fn runs_begin_and_end_with_switches_and_waits_with_wakeups() {
        let mut runs = Runs::new(100, vec![present(5, 5, "sh")], Vec::new(), false);
        let sh = || task(5, "sh", 120);
        let cat = || task(6, "cat", 120);
        let begin = What::Begin {
            tid: 6,
            name: "sh".into(),
            parent: 5,
            is_thread: false,
        };
        let events = vec![
            (130, 0, begin),
            (131, 0, What::Wakeup { tid: 6 }),
            // It runs already: it does not wait.
            (132, 0, What::Wakeup { tid: 5 }),
            // Preempted.
            (140, 0, switch(sh(), true, cat())),
            (150, 0, switch(cat(), false, sh())),
            (155, 1, switch(idle(), true, task(7, "dd", 120))),
            (160, 0, switch(sh(), false, idle())),
        ];
        of(&mut runs, events);
        let (threads, runs) = runs.end(200, &[]);
        let expected = [
            (0, 0, 100, 140, 0),
            (0, 1, 140, 150, 9),
            (0, 0, 150, 160, 10),
            (1, 2, 155, 200, 0),
        ];
        assert_eq!(rows(&runs), expected);
        let names = threads.iter().map(|one| (one.tid, one.name.as_str()));
        assert_eq!(
            names.collect::<Vec<_>>(),
            [(5, "sh"), (6, "cat"), (7, "dd")]
        );
        assert!(runs.iter().all(|run| run.class.is_none()));
    }

    #[test]
    fn what_is_recorded_before_the_beginning_is_cut_off_there() {
        let mut runs = Runs::new(100, vec![present(5, 5, "sh")], Vec::new(), false);
        let [sh, cat, dd] =
            [(5, "sh"), (6, "cat"), (7, "dd")].map(|(tid, name)| move || task(tid, name, 120));
        let begin = What::Begin {
            tid: 6,
            name: "sh".into(),
            parent: 5,
            is_thread: false,
        };
        let events = vec![
            (60, 0, begin),
            (61, 0, What::Wakeup { tid: 6 }),
            (70, 0, switch(sh(), true, cat())),
            (80, 0, switch(cat(), false, dd())),
            (110, 0, switch(dd(), false, sh())),
            (120, 0, switch(sh(), false, idle())),
        ];
        of(&mut runs, events);
        let (threads, runs) = runs.end(200, &[]);
        let expected = [(0, 0, 100, 110, 0), (0, 1, 110, 120, 10)];
        assert_eq!(rows(&runs), expected);
        let names: Vec<_> = threads.iter().map(|one| one.name.as_str()).collect();
        assert_eq!(names, ["dd", "sh"]);
    }

    #[test]
    fn threads_have_their_processes_vms_and_classes() {
        let told = vec![
            told(0, 50, None, Some(Class::Urgent)),
            told(10, 20, Some("box"), None),
            told(10, 20, None, Some(Class::Launch)),
            told(30, 20, None, Some(Class::Steady)),
        ];
        let there = vec![
            present(20, 20, "jiffy-vmm"),
            present(50, 50, "jiffy-pager"),
            present(9, 9, "rcu"),
        ];
        let mut runs = Runs::new(0, there, told, true);
        let vcpu = || task(21, "vcpu 0", 120);
        let begin = What::Begin {
            tid: 21,
            name: "jiffy-vmm".into(),
            parent: 20,
            is_thread: true,
        };
        let events = vec![
            (5, 0, begin),
            (10, 0, switch(idle(), true, vcpu())),
            (30, 0, switch(vcpu(), true, vcpu())),
            (31, 0, switch(vcpu(), true, task(21, "vcpu 0", 139))),
            (32, 0, switch(vcpu(), true, task(50, "jiffy-pager", 120))),
            (
                33,
                0,
                switch(task(50, "jiffy-pager", 120), true, task(9, "rcu", 120)),
            ),
            (
                34,
                0,
                switch(task(9, "rcu", 120), true, task(60, "sh", 120)),
            ),
            (35, 0, switch(task(60, "sh", 120), true, task(60, "sh", 98))),
            (
                36,
                0,
                switch(task(60, "sh", 98), true, task(50, "worker", 125)),
            ),
        ];
        of(&mut runs, events);
        let (threads, runs) = runs.end(40, &[]);
        let vcpu = &threads[0];
        assert_eq!((vcpu.tid, vcpu.pid), (21, 20));
        assert_eq!(
            (vcpu.name.as_str(), vcpu.process.as_str()),
            ("vcpu 0", "jiffy-vmm")
        );
        assert_eq!(vcpu.vm.as_deref(), Some("box"));
        assert_eq!(threads[1].vm, None);
        let classes = [
            Some(Class::Launch),
            Some(Class::Steady),
            Some(Class::Background),
            Some(Class::Urgent),
            Some(Class::Urgent),
            Some(Class::Steady),
            None,
            Some(Class::Steady),
        ];
        let found: Vec<_> = runs.iter().map(|run| run.class).collect();
        assert_eq!(found, classes);
    }

    #[test]
    fn an_id_that_is_used_again_is_another_thread_and_a_full_cpu_ends_with_its_last_event() {
        let mut runs = Runs::new(0, vec![present(8, 8, "old")], Vec::new(), false);
        let begin = What::Begin {
            tid: 8,
            name: "new".into(),
            parent: 1,
            is_thread: false,
        };
        let events = vec![
            (10, 0, switch(task(8, "old", 120), false, idle())),
            (20, 0, begin),
            (30, 0, switch(idle(), true, task(8, "new", 120))),
        ];
        of(&mut runs, events);
        let (threads, runs) = runs.end(90, &[0]);
        assert_eq!(rows(&runs), [(0, 0, 0, 10, 0), (0, 1, 30, 30, 0)]);
        assert_eq!(
            (threads[0].name.as_str(), threads[1].name.as_str()),
            ("old", "new")
        );
    }
}
