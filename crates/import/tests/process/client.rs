//! The daemon's side, without its checks.

use jiffy_sys::fork::Child;
use jiffy_sys::spawn::{Detached, Environment, spawn_detached};
use jiffy_wire::import::{
    Answer, Failure, Made, Request, SCRATCH, Source, decode_answer, encode, length,
};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// How long a process may take.
const TIMEOUT: Duration = Duration::from_secs(60);

/// A process that makes an image.
pub struct Import {
    folder: TempDir,
    image: File,
    pid: u32,
    child: Option<Child>,
    channel: Option<UnixStream>,
    stream: Option<std::io::PipeWriter>,
}

impl Import {
    /// With these sources; an archive comes by [`Import::stream`].
    pub fn start(source: Source, sources: &[&[u8]]) -> Import {
        Import::start_with(source, sources, |_| ())
    }

    /// Also changes the files that it gets: the image, then the temporary ones.
    pub fn start_with(
        source: Source,
        sources: &[&[u8]],
        change: impl FnOnce(&mut Vec<File>),
    ) -> Import {
        let piped = matches!(source, Source::Archive { .. });
        let mut import = Import::spawn(sources, piped, change);
        let request = Request {
            source,
            folder: "the folder".into(),
        };
        import.send(&encode(&request).unwrap());
        import
    }

    pub fn without_a_request() -> Import {
        Import::spawn(&[], true, |_| ())
    }

    fn spawn(sources: &[&[u8]], piped: bool, change: impl FnOnce(&mut Vec<File>)) -> Import {
        let folder = tempfile::tempdir().unwrap();
        let image = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(folder.path().join("image"))
            .unwrap();
        let scratch = |_| tempfile::tempfile_in(folder.path()).unwrap();
        let mut files = vec![image.try_clone().unwrap()];
        files.extend((0..SCRATCH).map(scratch));
        change(&mut files);
        for bytes in sources {
            let mut file = tempfile::tempfile().unwrap();
            file.write_all(bytes).unwrap();
            files.push(file);
        }
        let (ours, theirs) = UnixStream::pair().unwrap();
        ours.set_read_timeout(Some(TIMEOUT)).unwrap();
        let (reading, writing) = std::io::pipe().unwrap();
        let mut descriptors = vec![theirs.as_fd()];
        descriptors.extend(files.iter().map(AsFd::as_fd));
        if piped {
            descriptors.push(reading.as_fd());
        }
        let output = File::options().write(true).open("/dev/null").unwrap();
        let pid = spawn_detached(&Detached {
            program: Path::new(env!("CARGO_BIN_EXE_jiffy-import")),
            arguments: &[],
            directory: Path::new("/"),
            output: output.as_fd(),
            descriptors: &descriptors,
            environment: Environment::Empty,
        })
        .unwrap();
        drop(descriptors);
        Import {
            folder,
            image,
            pid,
            child: Some(Child::started(pid).unwrap()),
            channel: Some(ours),
            stream: Some(writing),
        }
    }

    pub fn send(&mut self, bytes: &[u8]) {
        self.channel.as_mut().unwrap().write_all(bytes).unwrap();
    }

    pub fn stream(&mut self) -> &mut std::io::PipeWriter {
        self.stream.as_mut().unwrap()
    }

    pub fn end_stream(&mut self) {
        self.stream = None;
    }

    /// Its answer, after any reports of progress.
    pub fn answer(&self) -> Answer {
        let mut channel = self.channel.as_ref().unwrap();
        loop {
            let mut head = [0; 4];
            channel.read_exact(&mut head).unwrap();
            let mut bytes = vec![0; length(head).unwrap()];
            channel.read_exact(&mut bytes).unwrap();
            match decode_answer(&bytes).unwrap() {
                Answer::Progress { .. } => {}
                answer => return answer,
            }
        }
    }

    /// Size and digest of the image.
    pub fn image(&self) -> (u64, blake3::Hash) {
        let bytes = fs::read(self.folder.path().join("image")).unwrap();
        (bytes.len() as u64, blake3::hash(&bytes))
    }

    pub fn file(&self) -> &File {
        &self.image
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn kill(&mut self) {
        drop(self.child.take());
    }

    /// The daemon closes its end of the channel, but not the stream.
    pub fn close(&mut self) {
        drop(self.channel.take());
        // A process that has begun notices when it wants to report.
        drop(self.stream.take());
    }

    pub fn ends_within(&mut self, time: Duration) {
        let until = Instant::now() + time;
        while self
            .status_file()
            .is_ok_and(|text| !text.contains("State:\tZ"))
        {
            assert!(Instant::now() < until, "it does not end");
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    fn status_file(&self) -> std::io::Result<String> {
        fs::read_to_string(format!("/proc/{}/status", self.pid))
    }

    pub fn status(&self) -> String {
        self.status_file().unwrap()
    }

    pub fn proc(&self, name: &str) -> String {
        fs::read_to_string(format!("/proc/{}/{name}", self.pid)).unwrap()
    }

    pub fn eventually(&self, what: &str, holds: impl Fn(&str) -> bool) {
        let until = Instant::now() + TIMEOUT;
        while !holds(&self.status()) {
            assert!(Instant::now() < until, "{what}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

pub fn made(answer: Answer) -> Made {
    match answer {
        Answer::Made(made) => made,
        other => panic!("{other:?}"),
    }
}

pub fn failed(answer: Answer) -> Failure {
    match answer {
        Answer::Failed(failure) => failure,
        other => panic!("{other:?}"),
    }
}

/// A tar of these files; names are not checked.
pub fn tar_of(files: &[(&str, &[u8])]) -> Vec<u8> {
    let mut builder = tar::Builder::new(Vec::new());
    for (name, contents) in files {
        let mut header = tar::Header::new_ustar();
        header.as_mut_bytes()[..name.len()].copy_from_slice(name.as_bytes());
        header.set_size(contents.len() as u64);
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_cksum();
        builder.append(&header, *contents).unwrap();
    }
    builder.into_inner().unwrap()
}
