//! `kernel/measure --monitor`: a chart of a boot with the monitor and its host's kernel. The host is
//! the machine's kernel with sched_ext, the only one of which there are symbols.

use jiffy_testkit::host_kernel;
use serde_json::Value;
use std::ops::Range;
use std::path::Path;
use std::process::Command;

/// A call: its process in the trace, its function, and its instructions.
struct Call {
    layer: String,
    name: String,
    at: Range<u64>,
}

fn calls(trace: &Value) -> Vec<Call> {
    let events = trace["traceEvents"].as_array().expect("events");
    let layer = |pid: &Value| {
        let named = |event: &&Value| event["name"] == "process_name" && event["pid"] == *pid;
        let event = events.iter().find(named).expect("each process has a name");
        event["args"]["name"].as_str().expect("text").to_owned()
    };
    let calls = events.iter().filter(|event| event["ph"] == "X");
    calls
        .map(|event| {
            let instructions = |field: &str| {
                let microseconds = event[field].as_f64().expect("a number");
                (microseconds * 1000.0).round() as u64
            };
            let start = instructions("ts");
            Call {
                layer: layer(&event["pid"]),
                name: event["name"].as_str().expect("text").to_owned(),
                at: start..start + instructions("dur"),
            }
        })
        .collect()
}

#[test]
fn a_chart_under_a_monitor_has_its_calls_those_of_the_host_and_those_of_the_guest() {
    let with_symbols = |flavour| {
        let kernel = host_kernel::built(flavour).expect("it is in the cache");
        kernel.with_file_name("vmlinux.debug")
    };
    let programs = std::env::current_exe().expect("this program");
    let programs = programs.ancestors().nth(2).expect("its folder");
    let folder = tempfile::tempdir().expect("a folder");
    let chart = folder.path().join("boot");
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../kernel/measure");
    let output = Command::new(script)
        .args(["--timeout", "600", "--least", "20000", "--chart"])
        .arg(&chart)
        .arg("--monitor")
        .arg(programs.join("jiffy-vmm"))
        .arg("--host")
        .arg(with_symbols(host_kernel::SCHED))
        .arg(with_symbols("base"))
        .output()
        .expect("it runs");
    assert!(output.status.success(), "{output:?}");

    let trace = std::fs::read(chart.with_extension("json")).expect("a trace");
    let calls = calls(&serde_json::from_slice(&trace).expect("JSON"));
    let of = |layer: &str, name: &str| -> Vec<&Call> {
        let wanted = |call: &&Call| call.layer == layer && call.name == name;
        let found: Vec<_> = calls.iter().filter(wanted).collect();
        assert!(!found.is_empty(), "no call of {name} in the {layer}");
        found
    };
    let builds = of("monitor", "jiffy_vmm::builder::Builder::build");
    let runs = of("host kernel", "kvm_arch_vcpu_ioctl_run");
    let starts = of("guest kernel", "start_kernel");
    let [start] = starts[..] else {
        panic!("the guest boots once");
    };
    assert!(builds[0].at.end <= runs[0].at.start);
    assert!(runs.iter().any(|run| run.at.contains(&start.at.start)));
    let svg = std::fs::read_to_string(chart.with_extension("svg")).expect("a flame chart");
    for layer in ["monitor", "host kernel", "guest kernel"] {
        assert!(svg.contains(&format!(">{layer}</text>")), "{layer}");
    }
}
