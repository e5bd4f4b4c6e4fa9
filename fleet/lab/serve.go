package main

import (
	"context"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"net/http/httputil"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/spf13/pflag"
	"go.etcd.io/etcd/api/v3/etcdserverpb"
	"go.etcd.io/etcd/server/v3/embed"
	"golang.org/x/sys/unix"
	utilerrors "k8s.io/apimachinery/pkg/util/errors"
	"k8s.io/client-go/rest"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/kubernetes/cmd/kube-apiserver/app"
	"k8s.io/kubernetes/cmd/kube-apiserver/app/options"
)

// Names of what is in the folder of a server.
const (
	lockName  = "fleet-lab.lock" // locked while a server uses the folder; also the sign that a folder is one of ours
	portName  = "port"
	logName   = "server.log"
	auditName = "audit.log"
	adminName = "admin.sock"
)

// madeHere is the text of the lock in a folder that a server made, and so removes.
const madeHere = "made here\n"

// socketPathMax is the size of `sun_path` (unix(7)) without its closing zero.
const socketPathMax = 107

// Time limits of a start and of an end. On an idle machine a start takes some seconds.
const (
	readyWithin = 3 * time.Minute
	endWithin   = 10 * time.Second
)

// ready is what a client needs; serve prints it as one line.
type ready struct {
	Server     string `json:"server"`
	Kubeconfig string `json:"kubeconfig"`
	Scheduler  string `json:"scheduler_kubeconfig"`
	Admin      string `json:"admin_socket"`
	AuditLog   string `json:"audit_log"`
	ReadyAfter int64  `json:"ready_after_ms"`
}

// auditPolicy has one line for each request that may change something.
const auditPolicy = `apiVersion: audit.k8s.io/v1
kind: Policy
omitStages: [RequestReceived]
rules:
  - level: Metadata
    verbs: [create, update, patch, delete, deletecollection]
  - level: None
`

type server struct {
	dir       string
	isResumed bool // the folder has the files of a server that was killed
	isMade    bool // the folder did not exist before the first server in it
	began     time.Time
	authority *pki
	etcd      *embed.Etcd
	closing   sync.Once
	listener  net.Listener
	admin     *rest.Config
	ready     ready
}

// serve runs an API server and all that it needs in a folder.
func serve(ctx context.Context, arguments []string) (err error) {
	began := time.Now()
	flags := flag.NewFlagSet("serve", flag.ContinueOnError)
	flags.SetOutput(io.Discard)
	dir := flags.String("dir", "", "")
	vmiStatus := flags.String("vmi-status", vmiStatusKubevirt, "")
	if err := flags.Parse(arguments); err != nil || *dir == "" || flags.NArg() > 0 {
		return errUsage{"cannot serve: --dir DIR is missing, or there are other arguments than --dir and --vmi-status"}
	}
	kinds, err := kubevirtKinds(*vmiStatus)
	if err != nil {
		return err
	}
	s := &server{dir: *dir, began: began}
	unlock, err := s.claim()
	if err != nil {
		return err
	}
	// Only of a folder that is ours: claim makes sure of that. A start that fails keeps what an earlier server left.
	defer func() {
		s.closeStore()
		if err == nil || !s.isResumed {
			err = errors.Join(err, removeContents(s.dir))
		}
		unlock()
	}()
	if err := s.logToFile(); err != nil {
		return err
	}
	apiserver, err := s.start(ctx)
	if err != nil {
		return s.explained(err)
	}
	if err := s.untilReady(ctx, apiserver, kinds); err != nil {
		return s.explained(err)
	}
	line, err := json.Marshal(s.ready)
	if err != nil {
		return err
	}
	fmt.Println(string(line))
	select {
	case err = <-apiserver:
		if ctx.Err() == nil {
			return s.explained(fmt.Errorf("the API server ended: %w", err))
		}
	case <-ctx.Done():
		// It lets requests in progress end, and watches go on for as long as their clients like.
		select {
		case <-apiserver:
		case <-time.After(endWithin):
		}
	}
	return nil
}

// closeStore ends etcd, which may be closed once only.
func (s *server) closeStore() {
	s.closing.Do(func() {
		if s.etcd != nil {
			s.etcd.Close()
		}
	})
}

// claim makes the folder, or takes over the one of a server that was killed.
func (s *server) claim() (unlock func(), err error) {
	if s.dir, err = filepath.Abs(s.dir); err != nil {
		return nil, err
	}
	if longest := filepath.Join(s.dir, adminName); len(longest) > socketPathMax {
		return nil, fmt.Errorf("cannot serve in %s: its socket's path would have %d bytes of at most %d; "+
			"name a folder with a shorter path", s.dir, len(longest), socketPathMax)
	}
	_, err = os.Stat(s.dir)
	s.isMade = errors.Is(err, fs.ErrNotExist)
	if err := os.MkdirAll(s.dir, 0o700); err != nil {
		return nil, fmt.Errorf("cannot serve in %s: %w", s.dir, err)
	}
	entries, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, fmt.Errorf("cannot serve in %s: %w", s.dir, err)
	}
	path := filepath.Join(s.dir, lockName)
	_, err = os.Stat(path)
	s.isResumed = err == nil
	if errors.Is(err, fs.ErrNotExist) && len(entries) > 0 {
		return nil, fmt.Errorf("cannot serve in %s: it has files that are not of fleet-lab, and the end of a server "+
			"removes all files of its folder; name an empty or a new folder", s.dir)
	}
	lock, err := os.OpenFile(path, os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("cannot serve in %s: %w", s.dir, err)
	}
	if err := unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB); err != nil {
		lock.Close()
		return nil, fmt.Errorf("cannot serve in %s: another server uses it; end that one, or name another folder", s.dir)
	}
	// The first server writes down whether it made the folder, the later ones read it.
	if text, err := os.ReadFile(path); err == nil && len(text) > 0 {
		s.isMade = string(text) == madeHere
	} else if s.isMade {
		err = os.WriteFile(path, []byte(madeHere), 0o600)
		if err != nil {
			lock.Close()
			return nil, fmt.Errorf("cannot serve in %s: %w", s.dir, err)
		}
	}
	// Sockets of the store are named relative to it: an absolute path may be too long.
	if err := os.Chdir(s.dir); err != nil {
		lock.Close()
		return nil, fmt.Errorf("cannot serve in %s: %w", s.dir, err)
	}
	return func() {
		// As long as there are files, the lock says that they are ours.
		if entries, err := os.ReadDir(s.dir); err == nil && len(entries) == 1 {
			os.Remove(path)
			if s.isMade {
				os.Remove(s.dir)
			}
		}
		lock.Close()
	}, nil
}

// removeContents empties the folder but for its lock.
func removeContents(dir string) error {
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		if entry.Name() != lockName {
			err = errors.Join(err, os.RemoveAll(filepath.Join(dir, entry.Name())))
		}
	}
	if err != nil {
		return fmt.Errorf("cannot remove all files of %s: %w; remove that folder", dir, err)
	}
	return nil
}

// logToFile sends the standard error of all libraries to a file, and keeps the own one for the last line.
func (s *server) logToFile() error {
	own, err := unix.FcntlInt(2, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return fmt.Errorf("cannot keep standard error: %w", err)
	}
	ownStderr = os.NewFile(uintptr(own), "stderr")
	log, err := os.OpenFile(filepath.Join(s.dir, logName), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return fmt.Errorf("cannot write the log: %w", err)
	}
	defer log.Close()
	if err := unix.Dup3(int(log.Fd()), 2, 0); err != nil {
		return fmt.Errorf("cannot write the log: %w", err)
	}
	return nil
}

// explained adds the last error of the log, which is removed with the folder.
func (s *server) explained(err error) error {
	text, _ := os.ReadFile(filepath.Join(s.dir, logName))
	last := ""
	for _, line := range strings.Split(string(text), "\n") {
		if strings.HasPrefix(line, "E") || strings.HasPrefix(line, "F") {
			last = line
		}
	}
	if last == "" {
		return fmt.Errorf("cannot serve: %w", err)
	}
	return fmt.Errorf("cannot serve: %w; its log ends with: %s", err, last)
}

// start starts the store and the API server. The channel tells the end of the server.
func (s *server) start(ctx context.Context) (<-chan error, error) {
	var err error
	if s.authority, err = openPKI(filepath.Join(s.dir, "pki")); err != nil {
		return nil, err
	}
	if s.listener, err = s.listen(); err != nil {
		return nil, err
	}
	s.ready.Server = "https://" + s.listener.Addr().String()
	if err := s.writeFiles(); err != nil {
		return nil, err
	}
	if s.admin, err = clientcmd.BuildConfigFromFlags("", s.ready.Kubeconfig); err != nil {
		return nil, err
	}
	s.admin.QPS = -1
	if s.etcd, err = startStore(ctx); err != nil {
		return nil, fmt.Errorf("etcd does not start: %w", err)
	}
	completed, err := s.options(ctx)
	if err != nil {
		return nil, err
	}
	done := make(chan error, 1)
	go func() {
		err := app.Run(ctx, completed)
		s.closeStore()
		done <- err
	}()
	return done, nil
}

// listen takes a free port, or the port of the server that was killed here: its clients try that one again.
func (s *server) listen() (net.Listener, error) {
	path := filepath.Join(s.dir, portName)
	port := "0"
	if text, err := os.ReadFile(path); err == nil {
		port = string(text)
	}
	listener, err := net.Listen("tcp", net.JoinHostPort("127.0.0.1", port))
	if err != nil {
		return nil, err
	}
	port = strconv.Itoa(listener.Addr().(*net.TCPAddr).Port)
	return listener, os.WriteFile(path, []byte(port), 0o600)
}

// writeFiles writes certificates, kubeconfigs and the audit policy.
func (s *server) writeFiles() error {
	for _, write := range []func() error{
		func() error { return s.authority.server("apiserver") },
		func() error { _, err := s.authority.key("service-accounts"); return err },
		func() (err error) {
			s.ready.Kubeconfig, err = s.authority.client(s.dir, "admin", "fleet-lab-admin",
				[]string{"system:masters"}, s.ready.Server)
			return err
		},
		func() (err error) {
			s.ready.Scheduler, err = s.authority.client(s.dir, "scheduler", "system:kube-scheduler", nil, s.ready.Server)
			return err
		},
		func() error { return os.WriteFile("audit-policy.yaml", []byte(auditPolicy), 0o600) },
	} {
		if err := write(); err != nil {
			return err
		}
	}
	s.ready.Admin = filepath.Join(s.dir, adminName)
	s.ready.AuditLog = filepath.Join(s.dir, auditName)
	return nil
}

// A host with a port is the only form of a URL of etcd, so a relative path of a socket looks like one.
var (
	storeURL = url.URL{Scheme: "unix", Host: "etcd:0"}
	peerURL  = url.URL{Scheme: "unix", Host: "peer:0"}
)

// startStore starts etcd in the current folder. It does not wait for the disk: the store outlives a killed process,
// and need not outlive the machine.
func startStore(ctx context.Context) (*embed.Etcd, error) {
	config := embed.NewConfig()
	config.Dir = "etcd.data"
	config.ListenClientUrls, config.AdvertiseClientUrls = []url.URL{storeURL}, []url.URL{storeURL}
	config.ListenPeerUrls, config.AdvertisePeerUrls = []url.URL{peerURL}, []url.URL{peerURL}
	config.InitialCluster = config.InitialClusterFromName(config.Name)
	config.UnsafeNoFsync = true
	config.EnableGRPCGateway = false
	config.LogLevel = "warn"
	config.LogOutputs = []string{embed.StdErrLogOutput}
	etcd, err := embed.StartEtcd(config)
	if err != nil {
		return nil, err
	}
	select {
	case <-etcd.Server.ReadyNotify():
		return etcd, nil
	case err := <-etcd.Err():
		return nil, err
	case <-time.After(readyWithin):
		err = fmt.Errorf("it is not ready within %s", readyWithin)
	case <-ctx.Done():
		err = ctx.Err()
	}
	etcd.Close()
	return nil, err
}

// options are those of kube-apiserver, as its program completes and checks them.
func (s *server) options(ctx context.Context) (options.CompletedOptions, error) {
	var none options.CompletedOptions
	o := options.NewServerRunOptions()
	flags := pflag.NewFlagSet("kube-apiserver", pflag.ContinueOnError)
	for _, set := range o.Flags().FlagSets {
		flags.AddFlagSet(set)
	}
	file := s.authority.file
	if err := flags.Parse([]string{
		"--etcd-servers=" + storeURL.String(),
		"--bind-address=127.0.0.1",
		"--advertise-address=127.0.0.1",
		// No pod reaches it by the service's address, and a loopback address may not be its endpoint.
		"--endpoint-reconciler-type=none",
		"--service-cluster-ip-range=10.0.0.0/16",
		"--tls-cert-file=" + file("apiserver.crt"),
		"--tls-private-key-file=" + file("apiserver.key"),
		"--client-ca-file=" + file("ca.crt"),
		"--service-account-issuer=https://kubernetes.default.svc",
		"--service-account-key-file=" + file("service-accounts.key"),
		"--service-account-signing-key-file=" + file("service-accounts.key"),
		"--authorization-mode=Node,RBAC",
		"--enable-admission-plugins=NodeRestriction",
		// A taint of new nodes that only the node lifecycle controller removes, which is not present here.
		"--disable-admission-plugins=TaintNodesByCondition",
		"--allow-privileged=true",
		"--audit-policy-file=" + filepath.Join(s.dir, "audit-policy.yaml"),
		"--audit-log-path=" + s.ready.AuditLog,
		"--profiling=false",
	}); err != nil {
		return none, err
	}
	o.SecureServing.Listener = s.listener
	o.SecureServing.BindPort = s.listener.Addr().(*net.TCPAddr).Port
	if err := o.GenericServerRunOptions.ComponentGlobalsRegistry.Set(); err != nil {
		return none, err
	}
	rest.SetDefaultWarningHandler(rest.NoWarnings{})
	completed, err := o.Complete(ctx)
	if err != nil {
		return none, err
	}
	return completed, utilerrors.NewAggregate(completed.Validate())
}

// untilReady waits for the API server, then starts the controllers and makes KubeVirt's kinds.
func (s *server) untilReady(ctx context.Context, apiserver <-chan error, kinds [][]byte) error {
	within, cancel := context.WithTimeout(ctx, readyWithin)
	defer cancel()
	client, err := rest.HTTPClientFor(s.admin)
	if err != nil {
		return err
	}
	for answer := ""; answer != "ok"; {
		select {
		case err := <-apiserver:
			return fmt.Errorf("the API server ended: %w", err)
		case <-within.Done():
			return fmt.Errorf("the API server is not ready within %s: %q", readyWithin, answer)
		case <-time.After(50 * time.Millisecond):
		}
		answer = get(within, client, s.ready.Server+"/readyz")
	}
	if err := s.serveAdmin(); err != nil {
		return err
	}
	if err := startControllers(ctx, s.admin); err != nil {
		return fmt.Errorf("its controllers do not start: %w", err)
	}
	if err := applyKinds(within, s.admin, kinds); err != nil {
		return fmt.Errorf("it refuses KubeVirt's kinds: %w", err)
	}
	if err := untilAccountsExist(within, s.admin); err != nil {
		return err
	}
	s.ready.ReadyAfter = time.Since(s.began).Milliseconds()
	return nil
}

// get is the answer's text, or why there is no answer.
func get(ctx context.Context, client *http.Client, address string) string {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		return err.Error()
	}
	response, err := client.Do(request)
	if err != nil {
		return err.Error()
	}
	defer response.Body.Close()
	text, _ := io.ReadAll(response.Body)
	return string(text)
}

// serveAdmin answers on a Unix socket: requests go on to the API server as the administrator's, or as another user's
// by the headers `Impersonate-*`. So a test needs neither certificates nor a library for them. POST /fleet-lab/compact
// makes the store forget all revisions but the newest.
func (s *server) serveAdmin() error {
	os.Remove(adminName)
	listener, err := net.Listen("unix", adminName)
	if err != nil {
		return err
	}
	if err := os.Chmod(adminName, 0o600); err != nil {
		return err
	}
	transport, err := rest.TransportFor(s.admin)
	if err != nil {
		return err
	}
	target, err := url.Parse(s.ready.Server)
	if err != nil {
		return err
	}
	proxy := &httputil.ReverseProxy{
		Transport:     transport,
		Rewrite:       func(request *httputil.ProxyRequest) { request.SetURL(target) },
		FlushInterval: -1,
	}
	routes := http.NewServeMux()
	routes.Handle("/", proxy)
	routes.HandleFunc("POST /fleet-lab/compact", func(answer http.ResponseWriter, request *http.Request) {
		revision := s.etcd.Server.KV().Rev()
		compact := &etcdserverpb.CompactionRequest{Revision: revision, Physical: true}
		if _, err := s.etcd.Server.Compact(request.Context(), compact); err != nil {
			http.Error(answer, err.Error(), http.StatusInternalServerError)
			return
		}
		fmt.Fprintf(answer, "{\"revision\":%d}\n", revision)
	})
	go http.Serve(listener, routes)
	return nil
}
