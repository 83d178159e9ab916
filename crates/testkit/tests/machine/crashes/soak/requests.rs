//! Requests that wake a VM. Each is answered, or fails with a reason.

use super::causes::{Victim, is_about_a_lost_folder};
use super::trial::{Answer, HANG_LIMIT, Trial};
use super::vms::Vm;
use crate::http::{PROXY, get};
use std::time::{Duration, Instant};

/// The port of the VMs' servers.
pub const PORT: u16 = 8080;
/// Time limit of a connection, below that of the command that makes it.
const LIMIT: Duration = Duration::from_secs(240);

/// How long a connection to a published port waits until its VM is awake (docs/idle.md).
const WAKE_LIMIT: Duration = Duration::from_secs(120);

/// How a VM is asked for its token.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Way {
    Exec,
    Copy,
    /// A connection to a published port.
    Port,
    Proxy,
}

pub const WAYS: [Way; 4] = [Way::Exec, Way::Copy, Way::Port, Way::Proxy];

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Way::Exec => "exec",
            Way::Copy => "cp",
            Way::Port => "a published port",
            Way::Proxy => "the proxy",
        }
    }
}

/// A VM with a server, which sleeps when nobody uses it.
pub struct Host {
    pub vm: Vm,
    /// The port of the host that leads to its server.
    pub port: u16,
    /// When it was started; if it shares a folder with the host, the folder's server was, too.
    pub since: Instant,
    pub shares: bool,
}

/// The answer of a server, as far as it came.
struct Fetched {
    /// How the connection ended.
    end: String,
    /// Status and body of a complete answer.
    complete: Option<(u16, String)>,
    text: String,
}

impl Host {
    /// Asks for the token; returns whether the VM answered. If it did not, there is a reason.
    pub fn ask(&self, trial: &Trial, way: Way, scratch: &str) -> Result<bool, String> {
        match way {
            Way::Exec => {
                let cat = ["exec", &self.vm.name, "cat", "/root/token"];
                match self.command(trial, &cat)? {
                    Answer::Done(text) => self.is_token(&text),
                    Answer::Failed | Answer::Refused => Ok(false),
                }
            }
            Way::Copy => {
                let file = format!("{}:/root/token", self.vm.name);
                match self.command(trial, &["cp", &file, scratch])? {
                    Answer::Done(_) => {
                        self.is_token(&trial.jiffy.sh(&format!("cat {scratch}; rm {scratch}")))
                    }
                    Answer::Failed | Answer::Refused => Ok(false),
                }
            }
            Way::Port => self.fetch(trial, way, &format!("127.0.0.1:{}", self.port)),
            Way::Proxy => self.fetch(trial, way, PROXY),
        }
    }

    /// Whether the server of its folder was killed: then the folder is lost until the VM is started
    /// again.
    pub fn has_lost_its_folder(&self, trial: &Trial) -> bool {
        let is_files = |victim| victim == Victim::Files;
        let causes = trial.causes.lock().unwrap();
        self.shares && causes.killed_since(self.since, is_files)
    }

    fn is_token(&self, text: &str) -> Result<bool, String> {
        match text.trim_end() == self.vm.token {
            true => Ok(true),
            false => Err(format!("{} answered {text:?}", self.vm.name)),
        }
    }

    /// Runs `jiffy`, which may say that the folder is lost, if it is.
    fn command(&self, trial: &Trial, arguments: &[&str]) -> Result<Answer, String> {
        let is_of_folder =
            |said: &str| is_about_a_lost_folder(said) && self.has_lost_its_folder(trial);
        trial.ask_tolerating(Some(&self.vm.id), arguments, is_of_folder)
    }

    /// Sends an HTTP request to this address.
    fn fetch(&self, trial: &Trial, way: Way, address: &str) -> Result<bool, String> {
        let request = get(&self.vm.name, PORT, "/root/token");
        let began = trial.begin();
        let asks = trial.jiffy.ask(address, request, LIMIT);
        let output = asks.time_limit(HANG_LIMIT).output();
        let output = output.map_err(|error| format!("{error:#}"))?;
        let fetched = Fetched::of(output.text(), output.error_text());
        let what = format!(
            "{} by {}: {} after {} ms, {:?}",
            self.vm.name,
            way.name(),
            fetched.end,
            began.elapsed().as_millis(),
            fetched.text
        );
        trial.note(&what);
        let answered = self.judge(trial, way, began, &fetched);
        trial.count(answered == Ok(true));
        answered.map_err(|why| format!("{why}: {what}"))
    }

    /// An HTTP request ends with a status; without one only if the daemon or the VMM was killed, or
    /// if a published port leads to a VM that can't be woken.
    fn judge(
        &self,
        trial: &Trial,
        way: Way,
        began: Instant,
        fetched: &Fetched,
    ) -> Result<bool, String> {
        let lost_folder = self.has_lost_its_folder(trial);
        let causes = trial.causes.lock().unwrap();
        let id = &self.vm.id;
        match &fetched.complete {
            Some((200, body)) => self.is_token(body),
            Some((status, _)) if lost_folder && *status < 502 => Ok(false),
            Some((_, body)) if way == Way::Proxy && !body.contains("\"message\"") => {
                Err("it gives no reason".into())
            }
            Some((_, body)) if causes.explain(began, Some(id), body) => Ok(false),
            Some(_) => Err("nothing explains it".into()),
            None if fetched.end == "no end" => Err(format!("no end within {LIMIT:?}")),
            None if causes.explain_a_cut(began, id, way == Way::Port) => Ok(false),
            None if lost_folder => Ok(false),
            // A busy host: the connection is reset, and the VM must answer later.
            None if way == Way::Port && began.elapsed() >= WAKE_LIMIT => Ok(false),
            None => Err("cut without a reason".into()),
        }
    }
}

impl Fetched {
    fn of(text: String, end: String) -> Fetched {
        let complete = text
            .split_once("\r\n\r\n")
            .and_then(|(head, body)| complete(head, body, end == "closed"));
        Fetched {
            end,
            complete,
            text,
        }
    }
}

/// Status and body, if that is all of the answer.
fn complete(head: &str, body: &str, was_closed: bool) -> Option<(u16, String)> {
    let status = head.split(' ').nth(1)?.parse().ok()?;
    let length = head.lines().find_map(|line| {
        let (name, value) = line.split_once(':')?;
        let is_length = name.eq_ignore_ascii_case("content-length");
        is_length.then(|| value.trim().parse::<usize>().ok())?
    });
    // The end of the text is trimmed.
    let is_whole = length.map_or(was_closed, |length| body.trim_end().len() + 1 >= length);
    is_whole.then(|| (status, body.to_owned()))
}
