//! Steps with images and folders: those that need `jiffy-import`, `jiffy-origins` and `jiffy-files`.

use super::causes::{Victim, is_about_a_lost_folder};
use super::trial::{Answer, Trial};
use super::worker::Worker;
use crate::registry::HOST;
use std::time::Instant;

/// Files of the image that no shell command reads.
const FILES: u64 = 6;
/// A folder of the host.
const FOLDER: &str = "/tests/shared";

pub fn image() -> String {
    format!("{HOST}/tests/layers:1")
}

/// The same image in Jiffy's form: its chunks are read when a guest needs them.
fn on_demand() -> String {
    format!("{HOST}/tests/chunks:1")
}

/// Sums of the image's files.
pub struct Sums(Vec<String>);

/// Pushes the image in Jiffy's form, and makes the folder.
pub fn prepare(trial: &Trial) -> Result<Sums, String> {
    let image = image();
    trial.retry_until_done(&["pull", &image])?;
    let shell = [
        "run",
        "--rm",
        "--cold",
        "--entrypoint",
        "/bin/sh",
        &image,
        "-c",
    ];
    let sums = (0..FILES).map(sum_of).collect::<Vec<_>>();
    let sums = trial.retry_until_done(&[&shell[..], &[&sums.join("; ")]].concat())?;
    trial.retry_until_done(&["push", &image, &on_demand()])?;
    trial.retry_until_done(&["image", "rm", &image])?;
    trial
        .jiffy
        .sh(&format!("mkdir -p {FOLDER}; echo shared > {FOLDER}/file"));
    Ok(Sums(sums.lines().map(str::to_owned).collect()))
}

fn sum_of(file: u64) -> String {
    format!("md5sum < /usr/share/ballast-{file}")
}

/// After a complete pull, removes what interrupted ones have left.
pub fn remove_all(trial: &Trial) -> Result<(), String> {
    for image in [image(), on_demand()] {
        trial.retry_until_done(&["pull", &image])?;
        trial.eventually("the image is removed", || remove(trial, &image))?;
    }
    Ok(())
}

/// Removes an image unless a VM uses it; returns whether it is gone.
pub fn remove(trial: &Trial, image: &str) -> Result<bool, String> {
    let mut is_used = false;
    let answer = trial.ask_tolerating(None, &["image", "rm", image], |said| {
        is_used = said.contains("is in use by the VM");
        is_used || said.contains("There is no image")
    })?;
    Ok(!is_used && !matches!(answer, Answer::Failed))
}

impl Worker<'_> {
    /// Pulls an image that other workers pull and remove as well.
    pub fn pull_image(&mut self) -> Result<(), String> {
        let (image, name) = (image(), self.new_name("pulled"));
        self.trial.ask(None, &["pull", &image])?;
        let run = ["run", "--rm", "--name", &name, &image];
        match self.trial.ask(None, &run)? {
            Answer::Done(text) if text != "hello world /srv 1000" => {
                Err(format!("{image} said {text:?}"))
            }
            _ => Ok(()),
        }
    }

    pub fn remove_image(&mut self, odd: bool) -> Result<(), String> {
        let image = if odd { image() } else { on_demand() };
        remove(self.trial, &image).map(|_| ())
    }

    /// Reads a file of an image that is not on this node, or not completely.
    pub fn read_on_demand(&mut self, which: u64) -> Result<(), String> {
        let (image, name, file) = (on_demand(), self.new_name("read"), which % FILES);
        let script = sum_of(file);
        let run = ["run", "--rm", "--name", &name, "--entrypoint", "/bin/sh"];
        let run = [&run[..], &[&image, "-c", &script]].concat();
        let Some(text) = self.run_or(&run, Victim::is_pager, |said| said.contains("I/O error"))?
        else {
            return Ok(());
        };
        match text == self.trial.sums().0[file as usize] {
            true => Ok(()),
            false => Err(format!("file {file} of {image} has the sum {text:?}")),
        }
    }

    /// Reads a file of the host in a VM twice, with a pause.
    pub fn share_folder(&mut self) -> Result<(), String> {
        let (name, share) = (self.new_name("shared"), format!("{FOLDER}:/mnt"));
        let script = "cat /mnt/file; sleep 1; cat /mnt/file";
        let run = ["run", "--rm", "--name", &name, "-v", &share];
        let run = [&run[..], &["--", "sh", "-c", script]].concat();
        let is_server = |victim| victim == Victim::Files;
        match self.run_or(&run, is_server, is_about_a_lost_folder)? {
            Some(text) if text != "shared\nshared" => Err(format!("{name} read {text:?}")),
            _ => Ok(()),
        }
    }

    /// Makes an image of the VM's root file system, and reads the token from it.
    pub fn commit_vm(&mut self) -> Result<(), String> {
        let trial = self.trial;
        let Some(vm) = self.take_running_vm()? else {
            return Ok(());
        };
        let (image, name) = (self.new_name("image"), self.new_name("committed"));
        let answer = vm.ask(trial, &["commit", &vm.name, &image])?;
        let token = vm.token.clone();
        self.give_back(vm, &answer)?;
        if matches!(answer, Answer::Done(_)) {
            let run = ["run", "--rm", "--cold", "--name", &name, &image];
            let run = [&run[..], &["--", "cat", "/root/token"]].concat();
            match trial.ask(None, &run)? {
                Answer::Done(text) if text != token => {
                    return Err(format!("{image}: {text:?} is not {token:?}"));
                }
                _ => {}
            }
        }
        trial.eventually("the image is removed", || remove(trial, &image))
    }

    /// Runs a command in a VM; `None` if a kill explains its failure. Its program may fail with this
    /// error if one of these was killed meanwhile.
    fn run_or(
        &self,
        run: &[&str],
        killed: impl Fn(Victim) -> bool,
        is_of_the_kill: impl Fn(&str) -> bool,
    ) -> Result<Option<String>, String> {
        let began = Instant::now();
        let mut why = String::new();
        let answer = self.trial.ask_tolerating(None, run, |said| {
            why = said.to_owned();
            is_of_the_kill(said)
        })?;
        let causes = self.trial.causes.lock().unwrap();
        match answer {
            Answer::Done(text) => Ok(Some(text)),
            Answer::Refused if !causes.killed_since(began, killed) => {
                Err(format!("nothing explains it: {}: {why}", run.join(" ")))
            }
            Answer::Failed | Answer::Refused => Ok(None),
        }
    }
}
