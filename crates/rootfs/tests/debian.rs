//! Tests of Debian systems, with an archive of one package.

mod common;

use common::extract;
use jiffy_rootfs::debian::debian;
use jiffy_rootfs::{Debian, DebianError, ImportError, Limits};
use jiffy_sys::testing::write_program;
use std::fs;
use std::ops::ControlFlow;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;

fn run(command: &mut Command) -> Vec<u8> {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?} (see scripts/setup): {error}"));
    let words = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{command:?}: {words}");
    output.stdout
}

/// Makes an unsigned archive with the package `greeting`; returns its sources.list line.
fn archive(at: &Path) -> String {
    let package = at.join("greeting");
    fs::create_dir_all(package.join("DEBIAN")).unwrap();
    fs::create_dir_all(package.join("usr/share/greeting")).unwrap();
    fs::write(package.join("usr/share/greeting/text"), "hello").unwrap();
    let control = "Package: greeting\nVersion: 1\nArchitecture: all\n\
                   Maintainer: Nobody <nobody@example.org>\nDescription: a greeting\n";
    fs::write(package.join("DEBIAN/control"), control).unwrap();
    let pool = at.join("archive/pool");
    let index = at.join("archive/dists/test/main/binary-amd64");
    fs::create_dir_all(&pool).unwrap();
    fs::create_dir_all(&index).unwrap();
    let deb = pool.join("greeting.deb");
    run(Command::new("dpkg-deb")
        .args(["--root-owner-group", "--build"])
        .arg(&package)
        .arg(&deb));
    let sum = String::from_utf8(run(Command::new("sha256sum").arg(&deb))).unwrap();
    let entry = format!(
        "{control}Filename: pool/greeting.deb\nSize: {}\nSHA256: {}\n\n",
        fs::metadata(&deb).unwrap().len(),
        &sum[..64]
    );
    fs::write(index.join("Packages"), &entry).unwrap();
    let packages = index.join("Packages");
    let sum = String::from_utf8(run(Command::new("sha256sum").arg(&packages))).unwrap();
    let release = format!(
        "Origin: Test\nSuite: test\nCodename: test\nArchitectures: amd64\nComponents: main\n\
         Date: Mon, 01 Jan 2024 00:00:00 UTC\nSHA256:\n {} {} main/binary-amd64/Packages\n",
        &sum[..64],
        entry.len()
    );
    fs::write(at.join("archive/dists/test/Release"), release).unwrap();
    for folder in [at.to_owned(), at.join("archive")] {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755)).unwrap();
    }
    format!(
        "deb [trusted=yes] copy://{} test main",
        at.join("archive").display()
    )
}

#[test]
fn a_debian_build_is_reproducible() {
    let scratch = tempfile::tempdir().unwrap();
    let spec = Debian {
        include: vec!["greeting".into()],
        variant: "extract".into(),
        sources: vec![archive(scratch.path())],
        newest: 1_700_000_000,
        ..Debian::new("test")
    };
    let build = |name: &str| {
        debian(
            &spec,
            &scratch.path().join(name),
            &Limits::default(),
            &mut |_| ControlFlow::Continue(()),
        )
        .unwrap_or_else(|error| panic!("{}", common::sentence(&error)))
    };
    let (one, two) = (build("one"), build("two"));
    assert_eq!(one.digest, two.digest);
    assert_eq!(one.config.cmd, ["/bin/bash"]);
    let unpacked = extract(&scratch.path().join("one"));
    let text = fs::read_to_string(unpacked.root.join("usr/share/greeting/text")).unwrap();
    assert_eq!(text, "hello");
}

fn fails(spec: &Debian) -> DebianError {
    let out = tempfile::tempdir().unwrap();
    let result = debian(spec, &out.path().join("i"), &Limits::default(), &mut |_| {
        ControlFlow::Continue(())
    });
    assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
    result.unwrap_err()
}

/// Writes a program that replaces mmdebstrap.
fn stand_in(at: &Path, script: &str) -> Debian {
    let program = at.join("stand-in");
    write_program(&program, &format!("#!/bin/sh\n{script}\n"));
    Debian {
        sources: vec!["deb http://archive.example/ x main".into()],
        mmdebstrap: program,
        ..Debian::new("test")
    }
}

#[test]
fn failures_are_reported_with_a_message() {
    let scratch = tempfile::tempdir().unwrap();
    let absent = Debian {
        mmdebstrap: scratch.path().join("absent"),
        sources: vec!["x".into()],
        ..Debian::new("test")
    };
    let text = fails(&absent).to_string();
    assert!(text.ends_with("apt-get install mmdebstrap"), "{text}");
    let text = fails(&stand_in(
        scratch.path(),
        "echo E: no such suite >&2; exit 3",
    ))
    .to_string();
    assert!(
        text.contains("exit status: 3") && text.contains("no such suite"),
        "{text}"
    );
    // The failure counts, even if the tar looks complete.
    let text = fails(&stand_in(scratch.path(), "head -c 10240 /dev/zero; exit 1")).to_string();
    assert!(text.contains("exit status: 1"), "{text}");
    let name = Debian::new("--help");
    assert!(matches!(fails(&name), DebianError::BadName(..)));
}

#[test]
fn a_progress_callback_may_cancel_a_debian_build() {
    let scratch = tempfile::tempdir().unwrap();
    let spec = stand_in(scratch.path(), "while :; do head -c 65536 /dev/zero; done");
    let mut seen = 0;
    let out = scratch.path().join("i");
    let error = debian(&spec, &out, &Limits::default(), &mut |_| {
        seen += 1;
        if seen > 20 {
            ControlFlow::Break(())
        } else {
            ControlFlow::Continue(())
        }
    })
    .unwrap_err();
    assert!(
        matches!(error, DebianError::Import(ImportError::Cancelled)),
        "{error}"
    );
}
