//! Damages every file and folder of a node in every way. The next daemon must start at once, report
//! what is wrong with the damaged object, and serve everything else.
//!
//! The cases are listed from the files of a node. `JIFFY_DAMAGE=TEXT` runs only the cases whose
//! name, PATH × DAMAGE, contains TEXT.

mod kinds;
mod node;
mod things;

use crate::client::{connect, request};
use crate::daemon::{Daemon, vmms};
use kinds::Damage;
use node::{Original, end_pagers};
use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, Instant};
use things::{ABSENT, Copy, Thing};

/// Time limit for a daemon to start, whatever a file holds.
const UP: Duration = Duration::from_secs(2);
/// How often a slow case is repeated alone: the host may be slow for a while.
const TRIES: usize = 10;
/// Placeholder for the id of the running VM, which differs in each copy.
const RUNNING: &str = "ID";

/// A path in a node's folder, and its damage.
#[derive(Debug, Clone)]
struct Case {
    path: PathBuf,
    damage: Damage,
    owner: Thing,
}

impl Case {
    fn name(&self) -> String {
        format!("{} × {:?}", self.path.display(), self.damage)
    }
}

/// Why a case failed.
#[derive(Debug)]
enum Failed {
    /// The daemon started too slowly.
    Late(Duration),
    Broken(String),
}

#[test]
fn the_daemon_starts_and_works_with_any_one_file_damaged() {
    let original = Original::make();
    let only = std::env::var("JIFFY_DAMAGE").unwrap_or_default();
    let mut cases = cases(&original);
    assert!(cases.len() > 200, "only {} cases", cases.len());
    cases.retain(|case| case.name().contains(&only));
    let count = cases.len();
    let begin = Instant::now();
    let todo = Mutex::new(cases);
    let (late, broken) = (Mutex::new(Vec::new()), Mutex::new(Vec::new()));
    let workers = std::thread::available_parallelism().map_or(2, |cores| cores.get()) + 1;
    std::thread::scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|| {
                let next = || todo.lock().unwrap().pop();
                while let Some(case) = next() {
                    match holds(&original, &case) {
                        Ok(()) => {}
                        Err(Failed::Late(_)) => late.lock().unwrap().push(case),
                        Err(Failed::Broken(why)) => {
                            let told = format!("{}: {why}", case.name());
                            broken.lock().unwrap().push(told);
                        }
                    }
                }
            });
        }
    });
    let mut broken = broken.into_inner().unwrap();
    for case in late.into_inner().unwrap() {
        let mut again = holds(&original, &case);
        for _ in 1..TRIES {
            again = again.or_else(|_| holds(&original, &case));
        }
        if let Err(why) = again {
            let why = match why {
                Failed::Late(took) => format!("the daemon was up after {took:?}, not {UP:?}"),
                Failed::Broken(why) => why,
            };
            broken.push(format!("{}: {why}", case.name()));
        }
    }
    broken.sort();
    eprintln!("{count} cases in {:.0} s", begin.elapsed().as_secs_f64());
    assert!(
        broken.is_empty(),
        "{} of {count}:\n{}",
        broken.len(),
        broken.join("\n")
    );
}

/// All cases, from the files of a copy in which a VM runs.
fn cases(original: &Original) -> Vec<Case> {
    let (daemon, running) = original.copy();
    let mut cases = Vec::new();
    for path in paths(&daemon) {
        let Some(owner) = original.owner(&path, &running) else {
            continue;
        };
        let text = path.to_str().unwrap().replace(&running, RUNNING);
        cases.extend(kinds::ALL.map(|damage| Case {
            path: text.clone().into(),
            damage,
            owner,
        }));
    }
    end(daemon);
    cases
}

/// The files and folders below a path.
fn paths(daemon: &Daemon) -> BTreeSet<PathBuf> {
    fn walk(folder: &Path, found: &mut BTreeSet<PathBuf>) {
        for entry in fs::read_dir(folder).unwrap().flatten() {
            let path = entry.path();
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                walk(&path, found);
            }
            found.insert(path);
        }
    }
    let mut found = BTreeSet::new();
    for folder in ["data", "run"] {
        walk(&daemon.folder.path().join(folder), &mut found);
    }
    let below = |path: &PathBuf| path.strip_prefix(daemon.folder.path()).unwrap().to_owned();
    found.iter().map(below).collect()
}

fn holds(original: &Original, case: &Case) -> Result<(), Failed> {
    let tried = catch_unwind(AssertUnwindSafe(|| {
        let (mut daemon, running) = original.copy();
        let held = damage_file(original, case, &mut daemon, &running);
        if let Err(Failed::Broken(_)) = &held {
            let log = fs::read_to_string(daemon.folder.path().join("jiffyd.log"));
            let log = log.unwrap_or_default();
            let lines: Vec<&str> = log
                .lines()
                .filter(|line| !line.contains(" DEBUG "))
                .collect();
            eprintln!("---- {}\n{}", case.name(), lines.join("\n"));
        }
        end(daemon);
        held
    }));
    tried.unwrap_or_else(|_| Err(Failed::Broken("a check panicked".into())))
}

fn damage_file(
    original: &Original,
    case: &Case,
    daemon: &mut Daemon,
    running: &str,
) -> Result<(), Failed> {
    let path = case.path.to_str().unwrap().replace(RUNNING, running);
    let path = daemon.folder.path().join(path);
    if fs::symlink_metadata(&path).is_err() || !case.damage.damage_file(&path) {
        return Ok(());
    }
    let place = original.place(case.owner, daemon, running);
    let before = place.as_deref().map(files_in).unwrap_or_default();
    let log = daemon.folder.path().join("jiffyd.log");
    let logged = fs::metadata(&log).map_or(0, |data| data.len());
    let took = up(daemon)?;
    let log = || fs::read_to_string(&log).unwrap()[logged as usize..].to_owned();
    let mut copy = Copy {
        original,
        daemon,
        running,
        log: log(),
    };
    let broken = |why: String| Failed::Broken(why);
    let mut hurt = vec![case.owner];
    hurt.extend(case.owner.needed_by());
    copy.others_work(&hurt).map_err(broken)?;
    let listed = copy.listed(case.owner);
    let after = place.as_deref().map(files_in).unwrap_or_default();
    let works = copy.works(case.owner);
    copy.log = log();
    let told = match (&listed, &works) {
        (Ok(None), Ok(())) => Ok(()),
        // The VM runs on, and its log continues when it is readable again.
        (Ok(Some(_)), Ok(())) if path.ends_with("command.log") => Ok(()),
        (Ok(Some(error)), Ok(())) => Err(format!("it works, and is shown with: {error}")),
        // Its contents are damaged and are only read when it is used; that must report the damage.
        (Ok(None), Err(why)) if case.damage.is_within() => things::sentence(why),
        (Ok(None), Err(why)) => Err(format!("it is shown as good, and: {why}")),
        (Err(why), _) if why == ABSENT => match may_be_absent(case, place.as_deref(), &path) {
            true => Ok(()),
            false => Err("it is there, and is not listed".into()),
        },
        _ => copy.inspected(case.owner),
    };
    told.map_err(broken)?;
    let never_was = case.damage == Damage::Missing && place.as_deref() == Some(&*path);
    let is_found_at_use = listed == Ok(None);
    if works.is_err() && !never_was && !is_found_at_use && !copy.logged(case.owner) {
        return Err(Failed::Broken("the log does not name it".into()));
    }
    if let Ok(Some(_)) = &listed {
        // The damaged path may belong to another object by now.
        let lost: Vec<_> = before
            .difference(&after)
            .filter(|file| !file.starts_with(&path))
            .collect();
        if !lost.is_empty() {
            return Err(Failed::Broken(format!("it was told of, and lost {lost:?}")));
        }
    }
    if listed.is_ok() {
        copy.removed(case.owner)
            .map_err(|why| Failed::Broken(format!("it can't be removed: {why}")))?;
    }
    if !daemon.is_up() {
        return Err(Failed::Broken("the daemon ended".into()));
    }
    match took {
        took if took > UP => Err(Failed::Late(took)),
        _ => Ok(()),
    }
}

/// May an object be missing without a report? So if no file shows that it existed, or nothing needs
/// it.
fn may_be_absent(case: &Case, place: Option<&Path>, path: &Path) -> bool {
    let is_gone = matches!(case.damage, Damage::Missing | Damage::Empty);
    let whole = place.is_none_or(|place| place == path);
    let only_file = case.owner == Thing::Kernel;
    // A daemon that ends while it makes a VM leaves a folder without a record.
    let record = path.ends_with("vm.json") && case.owner == Thing::Running;
    case.owner == Thing::Golden || is_gone && (whole || only_file || record)
}

/// Starts the next daemon; returns the time until it answers.
fn up(daemon: &mut Daemon) -> Result<Duration, Failed> {
    let begin = Instant::now();
    daemon.begin(daemon.command());
    loop {
        let answered = connect(&daemon.socket())
            .and_then(|stream| request(stream, "GET /v1/info HTTP/1.1", b""));
        if answered.is_ok() {
            return Ok(begin.elapsed());
        }
        if !daemon.is_up() {
            return Err(Failed::Broken("the daemon ended instead".into()));
        }
        if begin.elapsed() > UP * 10 {
            return Err(Failed::Late(begin.elapsed()));
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn files_in(place: &Path) -> BTreeSet<PathBuf> {
    let mut found = BTreeSet::new();
    let mut folders = vec![place.to_owned()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            match entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                true => folders.push(entry.path()),
                // What a daemon that was killed did not complete is removed.
                false if is_incomplete(&entry.file_name()) => {}
                false => drop(found.insert(entry.path())),
            }
        }
    }
    found
}

/// Is it a file that `sys::durable` had not renamed yet?
fn is_incomplete(name: &OsStr) -> bool {
    let name = name.as_encoded_bytes();
    name.starts_with(b".") && name.ends_with(b".tmp")
}

/// Ends all processes of a copy.
fn end(daemon: Daemon) {
    for pid in vmms(&daemon.data) {
        crate::daemon::kill(pid);
    }
    end_pagers(&daemon);
}
