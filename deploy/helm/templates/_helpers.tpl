{{- define "rwkv.labels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "rwkv.selector" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- /* The file for three servers, with those of this release: their names are asked of the cluster's DNS. */ -}}
{{- define "rwkv.haproxy" -}}
{{- $name := .Release.Name -}}
{{- $domain := printf "%s-server.%s.svc.%s" .Release.Name .Release.Namespace .Values.clusterDomain -}}
{{- $sessions := "" -}}
{{- $anywhere := "" -}}
{{- range $i := until (int .Values.servers.max) -}}
{{- $place := printf "%s-server-%d.%s:8000 id %d resolvers cluster init-addr none" $name $i $domain (add1 $i) -}}
{{- $sessions = printf "%s    server s%d %s check\n" $sessions (add1 $i) $place -}}
{{- $anywhere = printf "%s    server s%d %s\n" $anywhere (add1 $i) $place -}}
{{- end -}}
{{- $file := .Files.Get "haproxy.cfg" -}}
{{- $file = regexReplaceAll "(?m)(?:^    server s\\d+ .* check\\n)+" $file $sessions -}}
{{- $file = regexReplaceAll "(?m)(?:^    server s\\d+ \\S+ id \\d+\\n)+" $file $anywhere -}}
{{- $file = regexReplaceAll "(?m)^    (?:user|group) .*\\n" $file "" -}}
{{- $file = regexReplaceAll "(?m)^    bind .*$" $file "    bind :8000" -}}
{{- $file = regexReplaceAll "(?m)^    stats socket \\S+" $file "    stats socket /tmp/haproxy.sock" -}}
{{- $file = regexReplaceAll "(?m)^defaults$" $file "resolvers cluster\n    parse-resolv-conf\n    hold valid 1s\n    hold nx 1s\n    hold refused 1s\n\ndefaults" -}}
{{- $file -}}
{{- end }}
