// fleet-lab is a Kubernetes control plane for tests on one machine: a real API server with its store, the real
// scheduler, nodes that exist on paper, Helm's real client and a caller of KubeVirt's node hooks. One program, so that
// tests build and cache it once.
//
//	serve ──── etcd ◀── kube-apiserver ◀──┬── schedule   (kube-scheduler)
//	  │        controllers ───────────────┤   nodes      (kubelets without containers)
//	  └─ admin.sock: requests of tests ───┘   helm       (install, upgrade, uninstall, template …)
//	                                          hook       (virt-handler's call of a node hook)
package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// usage is printed by `fleet-lab help`, and named by every mistake in the arguments.
const usage = `Usage: fleet-lab COMMAND [OPTIONS]

  serve --dir DIR [--vmi-status kubevirt|subresource]
        An API server with its store and controllers in DIR, until SIGTERM or the end of the parent process. Prints one
        line of JSON when it is ready. SIGTERM removes what is in DIR, and DIR if it did not exist before; after a
        SIGKILL, serve with the same DIR goes on with the same objects, port and certificates.
  schedule --kubeconfig FILE [OPTION OF kube-scheduler]...
        The scheduler, until SIGTERM or the end of the parent process.
  nodes --kubeconfig FILE --count N [--prefix NAME] [--resource NAME=AMOUNT]... [--guests M]
        N nodes, on which pods become running and end as on real ones; with M, also M guests of KubeVirt that are
        spread over the nodes. Prints one line of JSON when all of that exists; until SIGTERM or the end of the parent.
  helm ARGUMENT...
        Helm's command line.
  hook --socket SOCKET --point POINT --vmi FILE [--node NAME] [--timeout DURATION]
        Calls a node hook as virt-handler does. Exit code 0 when the hook agrees, 1 with its message when it refuses.
`

// errUsage is a mistake in the arguments: exit code 2.
type errUsage struct{ what string }

func (e errUsage) Error() string {
	return e.what + "; run fleet-lab help"
}

func main() {
	os.Exit(run(os.Args[1:]))
}

func run(arguments []string) int {
	if len(arguments) == 0 {
		return report(errUsage{"cannot run: no command is named"})
	}
	command, rest := arguments[0], arguments[1:]
	switch command {
	case "serve":
		return report(serve(untilTold(), rest))
	case "schedule":
		return report(schedule(untilTold(), rest))
	case "nodes":
		return report(nodes(untilTold(), rest))
	case "helm":
		return helm(rest)
	case "hook":
		return report(hook(rest))
	case "help", "--help", "-h":
		fmt.Print(usage)
		return 0
	}
	return report(errUsage{fmt.Sprintf("cannot run %q: there is no such command", command)})
}

// report prints an error as one line of standard error, and returns the exit code.
func report(err error) int {
	var mistake errUsage
	switch {
	case err == nil || errors.Is(err, context.Canceled):
		return 0
	case errors.As(err, &mistake):
		fmt.Fprintln(ownStderr, "fleet-lab:", err)
		return 2
	}
	fmt.Fprintln(ownStderr, "fleet-lab:", err)
	return 1
}

// ownStderr stays the terminal's or the test's when the standard error of libraries goes to a log.
var ownStderr = os.Stderr

// parentLookedAtEvery is the interval between two looks at the parent: no signal tells of the end of a parent
// process, only of the end of its thread that started this one, and tests start processes from short-lived threads.
const parentLookedAtEvery = 200 * time.Millisecond

// untilTold ends with SIGTERM, SIGINT, or the end of the process that started this one.
func untilTold() context.Context {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	parent := os.Getppid()
	go func() {
		for os.Getppid() == parent {
			time.Sleep(parentLookedAtEvery)
		}
		stop()
	}()
	return ctx
}
